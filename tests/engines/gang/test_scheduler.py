"""The scheduler's policy, without ranks: plans are made one after the other as if all steps took the same time."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from engines.gang.step_plan import Move, StepPlan
from tests.engines.gang.support.plans import all_plans, job, scheduler


def served(plan: StepPlan) -> dict[str, tuple[int, ...]]:
    return {work.job_steps[0].job_id: work.ranks for work in plan.works}


def test_nothing_to_do_is_no_plan() -> None:
    assert scheduler().next_plan() is None


def test_a_job_alone_takes_all_ranks_and_ends_with_its_last_step() -> None:
    alone = scheduler()
    alone.add(job("a", num_steps=3, previews=(2, 3)))
    steps = [work.job_steps[0] for plan in all_plans(alone) for work in plan.works]
    assert [(s.step, s.emit) for s in steps] == [(1, None), (2, "preview"), (3, "final")]
    assert not alone.num_steps_left


def test_jobs_take_turns() -> None:
    turns = scheduler()
    for name in "abc":
        turns.add(job(name, num_steps=2))
    assert ["".join(served(plan)) for plan in all_plans(turns)] == list("abcabc")


def test_an_exclusive_job_begins_when_the_others_have_ended_and_ends_before_the_next_begin() -> None:
    alone = scheduler()
    for name in "abCd":
        alone.add(replace(job(name, num_steps=2), exclusive=name.isupper()))
    assert ["".join(served(plan)) for plan in all_plans(alone)] == list("ababCCdd")


def test_an_exclusive_job_waits_for_the_plans_under_way() -> None:
    alone = scheduler()
    alone.add(replace(job("a", num_steps=1), exclusive=True))
    assert alone.next_plan(is_idle=False) is None
    assert list(served(alone.next_plan(is_idle=True))) == ["a"]


def test_a_late_job_joins_at_the_back_of_the_round() -> None:
    turns = scheduler()
    turns.add(job("a", num_steps=9))
    turns.add(job("b", num_steps=9))
    assert list(served(turns.next_plan())) == ["a"]
    turns.add(job("c", num_steps=9))
    assert ["".join(served(turns.next_plan())) for _ in range(4)] == list("bacb")


def test_jobs_wait_while_enough_run() -> None:
    single = scheduler(max_running_jobs=1)
    single.add(job("a", num_steps=2))
    single.add(job("b", num_steps=1))
    assert ["".join(served(plan)) for plan in all_plans(single)] == list("aab")


@pytest.mark.parametrize(
    "teams",
    [
        [(0, 1, 2, 3)],
        [(0, 1), (2, 3)],
        [(0, 1), (2,), (3,)],
        [(0,), (2,), (3,), (1,)],
    ],
)
def test_jobs_of_an_elastic_gang_run_side_by_side(teams: list[tuple[int, ...]]) -> None:
    side_by_side = scheduler(elastic=True)
    for i in range(len(teams)):
        side_by_side.add(job(str(i), num_steps=5))
    for plan in all_plans(side_by_side):
        assert served(plan) == {str(i): team for i, team in enumerate(teams)}


def test_a_gang_that_is_not_elastic_never_changes_a_team() -> None:
    rigid = scheduler()
    rigid.add(job("a", num_steps=4))
    rigid.next_plan()
    rigid.add(job("b"))
    assert {(work.num_ranks, plan.moves) for plan in all_plans(rigid) for work in plan.works} == {(4, ())}


def test_an_elastic_gang_is_shared_out_anew_when_a_job_begins_or_ends() -> None:
    elastic = scheduler(elastic=True)
    for name, num_steps in (("a", 5), ("b", 2), ("c", 3)):
        elastic.add(job(name, num_steps=num_steps))
        if name == "a":
            assert served(elastic.next_plan()) == {"a": (0, 1, 2, 3)}
    plans = all_plans(elastic)
    assert [served(plan) for plan in plans] == [
        {"a": (0, 1), "b": (2,), "c": (3,)},
        {"a": (0, 1), "b": (2,), "c": (3,)},
        {"a": (0, 1), "c": (2, 3)},
        {"a": (0, 1, 2, 3)},
    ]
    assert [plan.moves for plan in plans] == [
        (),
        (),
        (Move(job_id="c", source=3, ranks=(2,)),),
        (Move(job_id="a", source=0, ranks=(2, 3)),),
    ]


def test_team_sizes_that_the_engine_does_not_know_are_left_out() -> None:
    elastic = scheduler(elastic=True, team_sizes=(1, 4))
    for name in "ab":
        elastic.add(job(name))
    assert ["".join(served(plan)) for plan in all_plans(elastic)] == list("ababab"), "two jobs would leave ranks idle"


def test_jobs_of_one_shape_on_one_team_are_served_together() -> None:
    together = scheduler(max_batch=2)
    for name, shape in (("a", "square"), ("b", "wide"), ("c", "square"), ("d", "square")):
        together.add(replace(job(name, num_steps=2), shape=shape))
    jobs = [work.job_ids for plan in all_plans(together) for work in plan.works]
    assert jobs == [("a", "c"), ("b",), ("d", "a"), ("c", "d"), ("b",)]


def test_jobs_without_a_shape_are_served_one_by_one() -> None:
    apart = scheduler(max_batch=4)
    for name in "ab":
        apart.add(job(name, num_steps=1))
    assert [work.job_ids for plan in all_plans(apart) for work in plan.works] == [("a",), ("b",)]


def test_a_dropped_job_is_planned_no_more_and_the_ranks_are_told_once() -> None:
    dropping = scheduler()
    dropping.add(job("a", num_steps=9))
    dropping.add(job("b", num_steps=2))
    dropping.next_plan()
    dropping.drop("a")
    plan = dropping.next_plan()
    assert plan.drops == ("a",)
    assert [tuple(served(plan)), *map(tuple, map(served, all_plans(dropping)))] == [("b",), ("b",)]


def test_a_drop_alone_is_a_plan() -> None:
    dropping = scheduler()
    dropping.drop("admitted, and never started")
    assert dropping.next_plan() == StepPlan(sequence=0, drops=("admitted, and never started",))


def test_plans_are_numbered() -> None:
    numbered = scheduler()
    numbered.add(job("a", num_steps=4))
    assert [plan.sequence for plan in all_plans(numbered)] == [0, 1, 2, 3]


def test_the_scheduler_does_not_import_ray() -> None:
    check = "import sys, engines.gang.scheduler; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
