"""Jobs whose last steps have another shape, and other additions to the weights, than their first ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engines.gang import gang as gang_module
from engines.gang.eta.measured_times import StepTimes
from engines.gang.eta.prediction import StepPrediction, forwards_left, shape_name
from engines.gang.gang_config import GangConfig
from engines.gang.jobs.job import Job, JobDone, LastStage, Progress
from engines.gang.jobs.step_plan import StepPlan
from tests.engines.gang.support.fakes import FakeRequest, fake_job
from tests.engines.gang.support.helpers import run
from tests.engines.gang.support.plans import all_plans, job, scheduler
from tests.engines.gang.support.virtual_time import GpuRanks, run_in_virtual_time, virtual_gang
from tests.engines.gang.test_watchdog import LEFT, Steps

NUM_FIRST, NUM_LAST = 4, 3
SMALL, LARGE = "small", "large"
STEPS_S = {SMALL: 1.0, LARGE: 10.0}
LAST = LastStage(num_steps=NUM_LAST, shape=LARGE, estimates_s={1: 10.0}, additions="distilled")
MEASURED = StepPrediction(measured={(shape_name(shape), 1): step_s for shape, step_s in STEPS_S.items()})


def staged(name: str = "staged", **changes: object) -> Job:
    made = job(name, num_steps=NUM_FIRST + NUM_LAST)
    return replace(made, shape=SMALL, estimates_s={1: 1.0}, last_stage=LAST, **changes)  # type: ignore[arg-type]


def names(plans: list[StepPlan]) -> list[str]:
    return ["".join(work.job_ids) for plan in plans for work in plan.works]


def test_a_step_has_the_shape_and_the_additions_of_its_stage() -> None:
    one = staged(idle_steps=frozenset({3}))
    steps = range(1, one.num_steps + 1)
    assert [one.at(step).shape for step in steps] == [SMALL] * NUM_FIRST + [LARGE] * NUM_LAST
    assert [one.at(step).additions for step in steps] == [()] * NUM_FIRST + ["distilled"] * NUM_LAST
    stages = [[(stage.shape, number) for stage, number in one.stages_after(step)] for step in (0, 3, 4, 6, 7)]
    assert stages == [[(SMALL, 3), (LARGE, 3)], [(SMALL, 1), (LARGE, 3)], [(LARGE, 3)], [(LARGE, 1)], []]


def test_forwards_are_counted_in_those_of_the_stage() -> None:
    assert [forwards_left(staged(), step, 1) for step in (1, 4, 5, 7)] == [3 + 30, 30, 20, 0]
    assert forwards_left(staged(), 5, 5) == 2
    assert forwards_left(replace(staged(), estimates_s={}), 1, 1) == 3 + 3, "without estimates all count alike"


def test_a_prediction_counts_the_steps_of_both_stages() -> None:
    alone = scheduler(num_ranks=1, prediction=MEASURED)
    assert alone.lone_s(staged()) == alone.work_s(staged()) == NUM_FIRST + 10 * NUM_LAST
    alone.add(staged())
    assert alone.finish_times_s() == {"staged": pytest.approx(NUM_FIRST + 10 * NUM_LAST + MEASURED.switch_s)}
    for _ in range(NUM_FIRST + 1):
        alone.next_plan()
    assert alone.left_s() == {"staged": 10.0 * (NUM_LAST - 1)}
    assert alone.finish_times_s() == {"staged": pytest.approx(10.0 * (NUM_LAST - 1))}


def test_a_prediction_is_a_guess_until_both_stages_are_known() -> None:
    one_s = {(shape_name(SMALL), 1): 1.0}
    assert MEASURED.knows(staged())
    assert not StepPrediction(measured=one_s).knows(staged())
    assert StepPrediction(measured=one_s).knows(replace(staged(), last_stage=None))


def test_a_job_with_short_first_steps_waits_for_one_with_less_work() -> None:
    turns = scheduler(num_ranks=1, prediction=MEASURED)
    turns.add(staged("s"))
    turns.add(replace(job("p", num_steps=9), shape=SMALL))
    assert names(all_plans(turns)) == 9 * ["p"] + (NUM_FIRST + NUM_LAST) * ["s"]


def test_jobs_are_batched_within_a_stage() -> None:
    """The second job of each kind comes a step later than the first."""
    both = scheduler(num_ranks=1, prediction=MEASURED, max_batch=2)
    both.add(staged("a"))
    plans = [both.next_plan()]
    both.add(staged("b"))
    plans += all_plans(both)
    made = names([plan for plan in plans if plan is not None])
    assert made == ["a", *3 * ["ab"], "a", *2 * ["a"], "b", *3 * ["b"]]


def test_additions_of_the_last_stage_are_on_the_ranks_after_it() -> None:
    alone = scheduler(num_ranks=1, prediction=MEASURED)
    alone.add(staged())
    additions = []
    while alone.next_plan() is not None:
        additions.append(alone.additions)
    assert additions == [()] * NUM_FIRST + ["distilled"] * NUM_LAST


async def test_the_first_step_of_the_last_stage_may_compile() -> None:
    steps, one = Steps(), staged()
    for step in range(1, NUM_FIRST + 1):
        assert await steps.has_time(LEFT, was_warm=step > 1, job=one, step=step) is (step < 3)
    assert await steps.has_time(LEFT, was_warm=False, job=one, step=NUM_FIRST + 1)
    assert await steps.has_time(LEFT, was_warm=True, job=one, step=NUM_FIRST + 2)
    assert not await steps.has_time(LEFT, was_warm=True, job=one, step=NUM_FIRST + 3)


@pytest.mark.parametrize("is_known", [True, False])
def test_a_gang_measures_each_stage_and_tells_when_the_job_ends(
    is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without measured times the job's own steps and estimates are used, from the second step on."""
    monkeypatch.setattr(gang_module, "kill_ranks", lambda _: None)
    num_first, num_last = 12, 8
    last = replace(LAST, num_steps=num_last)
    known = StepTimes()
    if is_known:
        for shape in 2 * [*STEPS_S]:
            known.hear_step(replace(staged(), shape=shape), 1, STEPS_S[shape])
        assert known.changed()

    async def made() -> tuple[list[tuple[int, float, float | None]], JobDone]:
        def shape_of(step: int) -> str:
            return SMALL if step <= num_first else LARGE

        steps = {shape: {1: step_s} for shape, step_s in STEPS_S.items()}
        ranks = GpuRanks(1, steps, {"staged": shape_of})
        config = GangConfig(num_ranks=1, gpus_per_rank=1.0)
        async with virtual_gang(config, ranks, model="staged", step_times=known) as gang:
            request = FakeRequest(seed=1, num_steps=num_first + num_last)
            one = fake_job("staged", request, shape=SMALL, estimates_s={1: 1.0}, last_stage=last)
            events = await run(gang, one)
        told = [(event.step, event.gpu_s, event.eta_s) for event in events if isinstance(event, Progress)]
        (done,) = (event for event in events if isinstance(event, JobDone))
        return told, done

    told, done = run_in_virtual_time(made())
    whole_s = num_first + 10 * num_last
    assert done.gpu_s == pytest.approx(whole_s, rel=0.02)
    assert [step for step, *_ in told] == [*range(1, num_first + num_last + 1)]
    for step, _, eta_s in told[2:-1]:
        left_s = sum(10.0 if later > num_first else 1.0 for later in range(step + 1, num_first + num_last + 1))
        near = 11.0 if step > num_first - 2 else 0.2 * left_s  # a GPU's report comes a step early
        assert eta_s == pytest.approx(left_s, abs=near), step
    measured = known.prediction().measured
    assert measured == {(shape_name(shape), 1): pytest.approx(step_s, rel=0.1) for shape, step_s in STEPS_S.items()}
