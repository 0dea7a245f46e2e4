"""Only some steps of a cached job make forwards."""

from __future__ import annotations

import pytest

from pipelines.caching import MIN_STEPS, PATTERNS, CacheMode, CachePattern, computed_steps


def written(computed: tuple[bool, ...]) -> str:
    return "".join("x" if one else "." for one in computed)


@pytest.mark.parametrize(
    ("pattern", "num_steps", "expected"),
    [
        (CachePattern(first_share=0.4, num_skipped=1), 20, "xxxxxxxx.x.x.x.x.x.x"),
        (CachePattern(first_share=0.3, num_skipped=3), 20, "xxxxxx...x...x...x.x"),
        (CachePattern(first_share=0.3, num_skipped=2), 11, "xxxx..x..xx"),
    ],
)
def test_a_pattern(pattern: CachePattern, num_steps: int, expected: str) -> None:
    assert written(tuple(pattern.computes(step, num_steps) for step in range(num_steps))) == expected


@pytest.mark.parametrize("num_steps", [MIN_STEPS, 20, 28, 50, 100])
def test_a_faster_mode_makes_fewer_forwards_and_all_make_the_first_and_the_last(num_steps: int) -> None:
    modes: tuple[CacheMode, ...] = ("off", "conservative", "fast")
    steps = {mode: computed_steps(mode, num_steps) for mode in modes}
    counts = [sum(computed) for computed in steps.values()]
    assert counts == sorted(set(counts), reverse=True)
    for computed in steps.values():
        assert len(computed) == num_steps
        assert all((*computed[:3], computed[-1]))


def test_few_steps_are_refused_but_where_it_is_off() -> None:
    assert computed_steps("off", 1) == (True,)
    for mode in PATTERNS:
        with pytest.raises(
            ValueError, match=f"cache is '{mode}', which needs 10 steps or more.* is 9; .*set cache to off"
        ):
            computed_steps(mode, MIN_STEPS - 1)
