"""The scheduler makes plans one after the other, without ranks and without measured times."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from engines.gang.eta.prediction import StepPrediction, shape_name
from engines.gang.jobs.step_plan import Move, StepPlan
from engines.gang.policies.policy import POLICIES
from tests.engines.gang.support.plans import all_plans, job, num_steps_left, scheduler


def ranks_by_job(plan: StepPlan | None) -> dict[str, tuple[int, ...]]:
    assert plan is not None
    return {work.job_steps[0].job_id: work.ranks for work in plan.works}


def test_nothing_to_do_is_no_plan() -> None:
    assert scheduler().next_plan() is None


def test_a_job_alone_takes_all_ranks_and_ends_with_its_last_step() -> None:
    alone = scheduler()
    alone.add(job("a", num_steps=3, previews=(2, 3)))
    steps = [work.job_steps[0] for plan in all_plans(alone) for work in plan.works]
    assert [(s.step, s.emit) for s in steps] == [(1, None), (2, "preview"), (3, "final")]
    assert not num_steps_left(alone)


def test_jobs_that_are_alike_run_one_after_the_other() -> None:
    turns = scheduler()
    for name in "abc":
        turns.add(job(name, num_steps=2))
    assert ["".join(ranks_by_job(plan)) for plan in all_plans(turns)] == list("aabbcc")


def test_an_exclusive_job_begins_when_the_others_have_ended_and_ends_before_the_next_begin() -> None:
    alone = scheduler()
    for name in "abCd":
        alone.add(replace(job(name, num_steps=2), exclusive=name.isupper()))
    assert ["".join(ranks_by_job(plan)) for plan in all_plans(alone)] == list("aabbCCdd")


@pytest.mark.parametrize("elastic", [False, True])
def test_an_exclusive_job_waits_for_the_plans_under_way(elastic: bool) -> None:
    alone = scheduler(elastic=elastic)
    alone.add(replace(job("a", num_steps=1), exclusive=True))
    assert alone.next_plan(is_idle=False) is None
    assert list(ranks_by_job(alone.next_plan(is_idle=True))) == ["a"]


def test_a_short_job_pauses_a_long_one_at_the_next_step() -> None:
    turns = scheduler()
    turns.add(job("long", num_steps=9))
    assert list(ranks_by_job(turns.next_plan())) == ["long"]
    turns.add(job("short", num_steps=2))
    assert [list(ranks_by_job(turns.next_plan())) for _ in range(3)] == [["short"], ["short"], ["long"]]


def test_no_job_begins_while_as_many_have_begun_as_may() -> None:
    """Two jobs have states on the ranks: the shorter one goes on, and the next begins when it has ended."""
    full = scheduler(max_running_jobs=2)
    for name, num_steps in (("a", 9), ("b", 4), ("c", 1)):
        full.add(job(name, num_steps=num_steps))
        if name != "c":
            full.next_plan()
    assert ["".join(ranks_by_job(plan)) for plan in all_plans(full)] == list("bbbc") + 8 * ["a"]


def test_jobs_of_an_elastic_gang_run_side_by_side_where_that_makes_them_wait_less() -> None:
    """Two ranks are 1.1 times as fast as one: two jobs side by side wait less than one after the other."""
    for speedup, expected in ((1.1, {"a": (0,), "b": (1,)}), (1.9, {"a": (0, 1)})):
        elastic = scheduler(num_ranks=2, elastic=True)
        for name in "ab":
            elastic.add(replace(job(name, num_steps=5), estimates_s={1: 1.0, 2: 1 / speedup}))
        assert ranks_by_job(elastic.next_plan()) == expected


def test_a_job_gets_no_more_ranks_than_make_it_faster() -> None:
    elastic = scheduler(elastic=True)
    elastic.add(replace(job("small"), estimates_s={1: 1.0, 2: 0.7, 4: 0.8}))
    assert ranks_by_job(elastic.next_plan()) == {"small": (0, 1)}


def test_a_gang_that_is_not_elastic_never_changes_a_team() -> None:
    rigid = scheduler()
    rigid.add(job("a", num_steps=4))
    rigid.next_plan()
    rigid.add(job("b"))
    assert {(work.num_ranks, plan.moves) for plan in all_plans(rigid) for work in plan.works} == {(4, ())}


def test_an_elastic_gang_is_shared_out_anew_when_a_job_begins_or_ends() -> None:
    """Wider teams are hardly faster here: every job begins at once, and the remaining ones spread."""
    elastic = scheduler(elastic=True)
    for name, num_steps in (("a", 5), ("b", 2), ("c", 3)):
        elastic.add(replace(job(name, num_steps=num_steps), estimates_s={1: 1.0, 2: 0.95, 4: 0.94}))
        if name == "a":
            assert ranks_by_job(elastic.next_plan()) == {"a": (0, 1, 2, 3)}
    plans = all_plans(elastic)
    assert [ranks_by_job(plan) for plan in plans] == [
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


@pytest.mark.parametrize(("switch_s", "expected"), [(0.5, "aaccbbdd"), (0.0, "aabbccdd")])
def test_jobs_with_the_same_additions_run_together(switch_s: float, expected: str) -> None:
    turns = scheduler(prediction=StepPrediction(switch_s=switch_s))
    for name, additions in zip("abcd", ((), "one", (), "one"), strict=True):
        turns.add(replace(job(name, num_steps=2), additions=additions))
    assert "".join("".join(ranks_by_job(plan)) for plan in all_plans(turns)) == expected


def test_a_short_job_waits_for_no_longer_one_with_the_additions_of_the_last() -> None:
    """The change of weights takes half a second, and the other jobs take nine."""
    turns = scheduler(num_ranks=1, prediction=StepPrediction(switch_s=0.5))
    for name, num_steps, additions in (("a", 9, ()), ("b", 1, "one"), ("c", 9, ())):
        turns.add(replace(job(name, num_steps=num_steps), additions=additions))
    assert "".join("".join(ranks_by_job(plan)) for plan in all_plans(turns)) == "b" + 9 * "a" + 9 * "c"


def test_a_change_of_weights_costs_what_was_learned() -> None:
    turns = scheduler(num_ranks=1)
    for name, num_steps, additions in (("a", 1, ()), ("b", 2, "one"), ("c", 3, ())):
        turns.add(replace(job(name, num_steps=num_steps), additions=additions))
    turns.learn(StepPrediction(switch_s=1.5))
    assert "".join("".join(ranks_by_job(plan)) for plan in all_plans(turns)) == "acccbb"


def test_jobs_without_additions_come_first_where_the_weights_are_as_loaded_again() -> None:
    """The gang sleeps between the second job and the others. A change takes half a second."""
    for is_loaded_again, expected in ((False, "dc"), (True, "cd")):
        turns = scheduler(num_ranks=1, prediction=StepPrediction(switch_s=0.5))
        turns.add(replace(job("b", num_steps=1), additions="one"))
        turns.next_plan()
        for name, additions in (("c", ()), ("d", "one")):
            turns.add(replace(job(name, num_steps=1), additions=additions))
        if is_loaded_again:
            turns.forget_additions()
        assert "".join("".join(ranks_by_job(plan)) for plan in all_plans(turns)) == expected


@pytest.mark.parametrize("additions", [("one", "two"), ("two", "one")])
def test_jobs_of_an_elastic_gang_get_the_ranks_that_have_their_additions(additions: tuple[str, str]) -> None:
    """Two ranks are hardly faster than one. The first two jobs put "one" on rank 0 and "two" on rank 1."""
    elastic = scheduler(num_ranks=2, elastic=True)
    for names, kinds in (("ab", ("one", "two")), ("cd", additions)):
        for name, kind in zip(names, kinds, strict=True):
            one = replace(job(name, num_steps=2), additions=kind, estimates_s={1: 1.0, 2: 0.95})
            elastic.add(one)
    plans = [ranks_by_job(plan) for plan in all_plans(elastic)]
    assert plans[:2] == 2 * [{"a": (0,), "b": (1,)}]
    assert plans[2] == {"cd"[additions.index("one")]: (0,), "cd"[additions.index("two")]: (1,)}


@pytest.mark.parametrize(("move_s", "expected"), [(0.001, {"a": (0, 1)}), (100.0, {"a": (0,), "b": (1,)})])
def test_a_state_stays_where_it_is_once_moves_are_known_to_be_dear(
    move_s: float, expected: dict[str, tuple[int, ...]]
) -> None:
    """Two ranks turn out to be three times as fast as one, when both jobs have begun on one each."""
    elastic = scheduler(num_ranks=2, elastic=True, prediction=StepPrediction(measured=steps_s(on_two_s=0.95)))
    for name in "ab":
        elastic.add(replace(job(name, num_steps=9), shape="known"))
    assert ranks_by_job(elastic.next_plan()) == {"a": (0,), "b": (1,)}
    elastic.learn(StepPrediction(measured=steps_s(on_two_s=0.33), move_s=move_s))
    assert ranks_by_job(elastic.next_plan()) == expected


def steps_s(*, on_two_s: float) -> dict[tuple[str, int], float]:
    return {(shape_name("known"), 1): 1.0, (shape_name("known"), 2): on_two_s}


@pytest.mark.parametrize(
    ("of_two", "meanwhile"),
    [
        (0.9, {"large": (0,), "small": (1,)}),  # two ranks are of little use to the small one
        (0.5, {"small": (0, 1)}),  # and here of much, so that the large one waits less if it pauses for that long
    ],
)
def test_a_large_job_is_narrowed_for_a_small_one_where_all_wait_less_so_and_widened_again(
    of_two: float, meanwhile: dict[str, tuple[int, ...]]
) -> None:
    elastic = scheduler(num_ranks=2, elastic=True)
    elastic.add(replace(job("large", num_steps=9), estimates_s={1: 10.0, 2: 5.3}))
    assert ranks_by_job(elastic.next_plan()) == {"large": (0, 1)}
    elastic.add(replace(job("small", num_steps=2), estimates_s={1: 1.0, 2: of_two}))
    plans = [ranks_by_job(plan) for plan in all_plans(elastic)]
    assert plans[:2] == [meanwhile, meanwhile]
    assert {frozenset(plan.items()) for plan in plans[2:]} == {frozenset({("large", (0, 1))})}


def test_plans_are_for_the_teams_that_are_free() -> None:
    """A team with short steps does not wait for one with long ones."""
    elastic = scheduler(num_ranks=2, elastic=True)
    for name, step_s in (("slow", 7.0), ("quick", 1.0)):
        elastic.add(replace(job(name, num_steps=9), estimates_s={1: step_s, 2: 0.99 * step_s}))
    first = elastic.next_plan()
    assert set(ranks_by_job(first)) == {"slow", "quick"}
    (rank,) = ranks_by_job(first)["quick"]
    assert elastic.next_plan(free=()) is None
    plan = elastic.next_plan(free={rank})
    assert plan is not None
    assert (ranks_by_job(plan), plan.is_for_all) == ({"quick": (rank,)}, False)
    elastic.drop("slow")
    told = elastic.next_plan(free=())
    assert told is not None
    assert (told.drops, told.works, told.is_for_all) == (("slow",), (), True)


def test_team_sizes_that_the_engine_does_not_know_are_left_out() -> None:
    elastic = scheduler(elastic=True, team_sizes=(1, 4))
    for name in "ab":
        elastic.add(replace(job(name), estimates_s={1: 1.0, 4: 0.9}))
    assert {len(ranks) for plan in all_plans(elastic) for ranks in ranks_by_job(plan).values()} <= {1, 4}


def test_jobs_of_one_shape_on_one_team_are_served_together() -> None:
    together = scheduler(max_batch=2)
    for name, shape in (("a", "square"), ("b", "wide"), ("c", "square"), ("d", "square")):
        together.add(replace(job(name, num_steps=2), shape=shape))
    jobs = [work.job_ids for plan in all_plans(together) for work in plan.works]
    assert jobs == [("a", "c"), ("a", "c"), ("b",), ("b",), ("d",), ("d",)]


def test_jobs_without_a_shape_are_served_one_by_one() -> None:
    apart = scheduler(max_batch=4)
    for name in "ab":
        apart.add(job(name, num_steps=1))
    assert [work.job_ids for plan in all_plans(apart) for work in plan.works] == [("a",), ("b",)]


def test_a_dropped_job_is_planned_no_more_and_the_ranks_are_told_once() -> None:
    dropping = scheduler()
    dropping.add(job("a", num_steps=9))
    dropping.next_plan()
    dropping.add(job("b", num_steps=2))
    dropping.drop("a")
    plan = dropping.next_plan()
    assert plan is not None
    assert plan.drops == ("a",)
    assert [tuple(ranks_by_job(plan)), *map(tuple, map(ranks_by_job, all_plans(dropping)))] == [("b",), ("b",)]


def test_a_drop_alone_is_a_plan() -> None:
    dropping = scheduler()
    dropping.drop("admitted, and never started")
    assert dropping.next_plan() == StepPlan(sequence=0, drops=("admitted, and never started",))


def test_plans_are_numbered() -> None:
    numbered = scheduler()
    numbered.add(job("a", num_steps=4))
    assert [plan.sequence for plan in all_plans(numbered)] == [0, 1, 2, 3]


def test_neither_the_scheduler_nor_a_policy_imports_ray() -> None:
    """This holds for indirect imports too."""
    modules = ["engines.gang.jobs.scheduler", *(place.partition(":")[0] for place in POLICIES.values())]
    check = f"import sys, {', '.join(modules)}; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
