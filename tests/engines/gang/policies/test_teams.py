"""Each reason to leave teams as they are decides some case, and none decides more than it should."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engines.gang.policies.policy import Candidate, GangShape, Ranks, Teams
from engines.gang.policies.teams import quickest_teams
from tests.engines.gang.support.plans import job

GANG = GangShape(num_ranks=2, team_sizes=(1, 2), move_s=0.002)
SIDE_BY_SIDE, FIRST_ALONE = {"a": (0,), "b": (1,)}, {"a": (0, 1)}


def candidate(name: str, *, on_one_s: float, on_two_s: float, ranks: Ranks = (), holders: Ranks = ()) -> Candidate:
    return Candidate(
        job=job(name, num_steps=10),
        number=ord(name),
        num_left=10,
        step_s={1: on_one_s, 2: on_two_s},
        fastest_s=on_two_s,
        whole_s=10 * on_two_s,
        ranks=ranks,
        holders=holders,
    )


def teams(on_one_s: float, on_two_s: float, *, run: bool, gang: GangShape = GANG) -> Teams:
    """Return the teams of two equal jobs: both run side by side, or both are paused.

    Unchanged, both end after ten steps on one rank, and the next arrival waits as long: 30 ``on_one_s`` in all. If the
    first gets both ranks, that is 10, 20 and 20 ``on_two_s``: 50, equal to 30 if one step takes five thirds.
    """
    places: list[Ranks] = [(0,), (1,)]
    jobs = [
        candidate(name, on_one_s=on_one_s, on_two_s=on_two_s, ranks=place if run else (), holders=place)
        for name, place in zip("ab", places, strict=True)
    ]
    return quickest_teams(jobs, gang)


@pytest.mark.parametrize(
    ("on_one_s", "expected"),
    [
        (1.66, SIDE_BY_SIDE),
        (1.68, SIDE_BY_SIDE),  # 0.8 % are less than what a change must gain
        (1.705, SIDE_BY_SIDE),  # 2.3 % are more, and less than the gain required if a job is paused for it
        (1.72, FIRST_ALONE),
    ],
)
def test_teams_that_run_change_for_some_gain_and_jobs_are_paused_for_more(on_one_s: float, expected: Teams) -> None:
    assert teams(on_one_s, 1.0, run=True) == expected


@pytest.mark.parametrize(("on_one_s", "expected"), [(1.66, SIDE_BY_SIDE), (1.68, FIRST_ALONE)])
def test_teams_of_paused_jobs_are_those_by_which_all_wait_least(on_one_s: float, expected: Teams) -> None:
    assert teams(on_one_s, 1.0, run=False) == expected


@pytest.mark.parametrize(
    ("move_s", "on_two_s", "expected"),
    [(0.002, 0.001, SIDE_BY_SIDE), (0.0005, 0.001, FIRST_ALONE), (0.002, 0.1, FIRST_ALONE), (0.1, 0.1, SIDE_BY_SIDE)],
)
def test_a_state_is_moved_only_where_that_pays(move_s: float, on_two_s: float, expected: Teams) -> None:
    """The move costs both jobs its time. The second rank saves 1.6 ms in all with steps of 1 ms, and a hundred times
    that with steps of 100 ms."""
    assert teams(1.72 * on_two_s, on_two_s, run=False, gang=replace(GANG, move_s=move_s)) == expected
