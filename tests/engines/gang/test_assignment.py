"""How a gang is shared out among its jobs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.core.spec import tiling_sizes
from engines.gang.assignment import share_out

FOUR = (0, 1, 2, 3)


def teams(num_jobs: int, num_ranks: int = 4, **homes: int) -> list[tuple[int, ...]]:
    jobs = {name: homes.get(name) for name in "abcdefghij"[:num_jobs]}
    return list(share_out(tuple(range(num_ranks)), jobs, tiling_sizes(num_ranks)).values())


@pytest.mark.parametrize(
    ("num_jobs", "expected"),
    [
        (1, [FOUR]),
        (2, [(0, 1), (2, 3)]),
        (3, [(0, 1), (2,), (3,)]),
        (4, [(0,), (2,), (3,), (1,)]),
        (5, [(0,), (2,), (3,), (1,), (3,)]),
    ],
)
def test_four_ranks(num_jobs: int, expected: list[tuple[int, ...]]) -> None:
    assert teams(num_jobs) == expected


def test_jobs_stay_at_home_if_the_shares_allow_it() -> None:
    assert teams(2, a=3, b=0) == [(2, 3), (0, 1)]
    assert teams(2, a=2, b=3) == [(2, 3), (0, 1)], "the older stays"
    assert teams(4, a=3, b=2, c=1, d=0) == [(3,), (2,), (1,), (0,)]


def test_no_jobs_no_shares() -> None:
    assert teams(0) == []


@given(
    num_ranks=st.sampled_from([1, 2, 3, 4, 6, 8, 12]),
    homes=st.lists(st.one_of(st.none(), st.integers(0, 11)), min_size=1, max_size=14),
)
def test_teams_tile_the_gang_and_overlap_only_where_jobs_outnumber_ranks(
    num_ranks: int, homes: list[int | None]
) -> None:
    jobs = {str(number): home for number, home in enumerate(homes)}
    shares = share_out(tuple(range(num_ranks)), jobs, tiling_sizes(num_ranks))
    assert list(shares) == list(jobs)
    for ranks in shares.values():
        assert ranks[0] % len(ranks) == 0
        assert num_ranks % len(ranks) == 0
    distinct = set(shares.values())
    assert sum(len(ranks) for ranks in distinct) == num_ranks, "no rank is idle"
    assert len({rank for ranks in distinct for rank in ranks}) == num_ranks
    crowds = [list(shares.values()).count(ranks) for ranks in distinct]
    assert max(crowds) - min(crowds) <= max(1, len(jobs) - num_ranks)
