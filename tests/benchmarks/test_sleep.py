"""Requests to models that take turns match the calculation, and a run of the application on CPU ranks."""

from __future__ import annotations

import json

import pytest

from benchmarks.sleep import Alone, Answers, in_parts, main, summary_of


def by_ticks(arrivals_s: list[float], work_s: float, number: int, num: int, period_s: float) -> list[float]:
    """Walk through time in steps of a hundredth. Return the latencies."""
    left, ends, tick = [100 * work_s for _ in arrivals_s], [0.0 for _ in arrivals_s], 0
    while any(left):
        runs = int(tick % (100 * period_s) // (100 * period_s / num)) == number
        waiting = [i for i, arrival_s in enumerate(arrivals_s) if arrival_s * 100 <= tick and left[i]]
        if runs and waiting:
            left[waiting[0]] -= 1
            ends[waiting[0]] = (tick + 1) / 100
        tick += 1
    return [end_s - arrival_s for end_s, arrival_s in zip(ends, arrivals_s, strict=True)]


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("arrivals_s", [[0.0], [5.0, 5.5, 19.0], [13.0, 25.0, 59.0], [1.0, 1.0, 1.0, 1.0]])
@pytest.mark.parametrize("work_s", [0.5, 7.0, 25.0])
def test_requests_wait_for_the_part_of_their_gang(number: int, arrivals_s: list[float], work_s: float) -> None:
    expected = by_ticks(arrivals_s, work_s, number, 3, 30.0)
    assert in_parts(arrivals_s, work_s, number, 3, 30.0) == pytest.approx(expected)


def test_waits_are_times_beyond_those_of_requests_alone() -> None:
    expected = {name: Alone(data=b"", took_s=took_s) for name, took_s in {"a": 1.0, "b": 2.0}.items()}
    answers = {
        "a": Answers(arrivals_s=[0.0, 12.0], times_s=[1.5, 2.5], same_bytes=True),
        "b": Answers(arrivals_s=[0.0], times_s=[5.0], same_bytes=False),
    }
    found = summary_of(answers, expected, 20.0)
    assert found["wait_s"] == {"a": 1.0, "b": 3.0}
    assert found["wait_in_parts_s"] == {"a": 4.0, "b": 10.0}, "12 waits until 20, and b until 10"
    assert (found["num_requests"], found["same_bytes"]) == ({"a": 2, "b": 1}, False)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_models_that_do_not_fit_together_are_asked_at_once_and_killed_asleep(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "application --memory-gib 0.045 --steps 4 --seconds 10 --rounds 1 --set denoiser.num_ranks=1"
    status = main(words.split())
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert status == 0, document
    results = document["results"]
    assert [one["case"] for one in results] == ["start", "alone", "mixed", *["kill -9 of a rank"] * 2, *["swap"] * 2]
    mixed, *others = results[2:]
    assert min(mixed["num_requests"].values()) > 0
    assert all(one["same_bytes"] for one in (mixed, *others))
    assert [(one["was_asleep"], one["new_gang"]) for one in others[:2]] == [(True, True)] * 2
