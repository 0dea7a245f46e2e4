"""Every plan of the scheduler keeps its invariants, whatever jobs arrive in whatever order."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from engines.gang.jobs.step_plan import StepPlan
from tests.engines.gang.support.plans import all_plans, job, scheduler
from tests.support.unhurried import UNHURRIED


@settings(**UNHURRIED)
@given(
    num_ranks=st.sampled_from([1, 2, 4, 6, 8]),
    max_running=st.integers(1, 6),
    jobs=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3)), max_size=12),
)
def test_every_plan_is_sound(num_ranks: int, max_running: int, jobs: list[tuple[int, int]]) -> None:
    subject = scheduler(num_ranks=num_ranks, max_running_jobs=max_running)
    plans: list[StepPlan] = []
    for i, (num_steps, num_plans_before) in enumerate(jobs):
        plans += [plan for _ in range(num_plans_before) if (plan := subject.next_plan())]
        subject.add(job(str(i), num_steps=num_steps))
    plans += all_plans(subject)
    for plan in plans:
        assert [work.ranks for work in plan.works] == [tuple(range(num_ranks))], "all ranks work on one job"
    for i, (num_steps, _) in enumerate(jobs):
        mine = [work for plan in plans for work in plan.works if work.job_ids == (str(i),)]
        assert [work.job_steps[0].step for work in mine] == list(range(1, num_steps + 1))
    begun: set[str] = set()
    for step in (step for plan in plans for work in plan.works for step in work.job_steps):
        begun = begun - {step.job_id} if step.emit == "final" else begun | {step.job_id}
        assert len(begun) <= max_running, "the ranks keep the states of as many"


@settings(**UNHURRIED)
@given(
    num_ranks=st.sampled_from([1, 2, 4, 6, 8]),
    max_running=st.integers(1, 9),
    max_batch=st.integers(1, 3),
    jobs=st.lists(st.tuples(st.integers(1, 6), st.booleans(), st.integers(0, 3), st.sampled_from("xxy")), max_size=12),
)
def test_in_an_elastic_gang_every_step_finds_the_state_of_the_step_before(
    num_ranks: int, max_running: int, max_batch: int, jobs: list[tuple[int, bool, int, str]]
) -> None:
    subject = scheduler(num_ranks=num_ranks, max_running_jobs=max_running, elastic=True, max_batch=max_batch)
    plans: list[StepPlan] = []
    for i, (num_steps, is_square, num_plans_before, additions) in enumerate(jobs):
        plans += [plan for _ in range(num_plans_before) if (plan := subject.next_plan())]
        subject.add(replace(job(str(i), num_steps=num_steps), shape=is_square, additions=additions))
    plans += all_plans(subject)
    state: dict[tuple[int, str], int] = {}
    for plan in plans:
        for move in plan.moves:
            state |= {(rank, move.job_id): state[move.source, move.job_id] for rank in move.ranks}
        ranks = [rank for work in plan.works for rank in work.ranks]
        assert len(ranks) == len(set(ranks)), "a rank does one thing at a time"
        for work in plan.works:
            assert work.ranks[0] % work.num_ranks == 0, "aligned"
            assert len(work.job_steps) <= max_batch
            assert len({jobs[int(step.job_id)][3] for step in work.job_steps}) == 1, "one change of weights at most"
            for step in work.job_steps:
                before = {state.get((rank, step.job_id), 0) for rank in work.ranks}
                assert before == {step.step - 1}, "every rank of the team holds the newest state"
                state |= {(rank, step.job_id): step.step for rank in work.ranks}
    for i, (num_steps, _, _, _) in enumerate(jobs):
        assert [s.step for p in plans for w in p.works for s in w.job_steps if s.job_id == str(i)] == [
            *range(1, num_steps + 1)
        ]
