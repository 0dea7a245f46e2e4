"""A rank executes plans, without actors or a communicator."""

from __future__ import annotations

import logging
from dataclasses import replace
from weakref import WeakSet

import pytest
import torch
from torch import Tensor

from engines.additions import SwitchTimes
from engines.core.engine import EagerEngine, RankContext
from engines.core.model import Branch
from engines.core.resources import rank_resources
from engines.gang.gang_config import RankParts
from engines.gang.jobs.rank_jobs import RankJobs
from engines.gang.jobs.step_plan import Emit, JobStep, StepPlan, Work
from tests.engines.gang.support.fakes import (
    CONDITIONING_L,
    FakeAdditions,
    FakeRequest,
    FakeSampler,
    FakeState,
    fake_job,
    predict_whole,
    reference_latents,
    strike,
)


class OneRankEngine(EagerEngine):
    """Counts the branches of each ``predict``."""

    team_sizes = (1, 2)

    def __init__(self) -> None:
        self.num_branches: list[int] = []
        self.is_closed = False

    def predict(self, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> tuple[Tensor, ...]:
        self.num_branches.append(len(branches))
        for branch in branches:
            strike(branch.module.partition("@")[0])
        return tuple(predict_whole(branch.inputs["x_L"], branch.inputs["conditioning_L"]) for branch in branches)

    def warm_up(self, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> None:
        self.predict(branches, ranks)

    def close(self) -> None:
        self.is_closed = True


class TwoBranchSampler(FakeSampler):
    """Runs two forwards a step, as with true guidance; the first one counts."""

    def branches(self, state: FakeState) -> tuple[Branch, ...]:
        (branch,) = super().branches(state)
        return branch, replace(branch, inputs={name: -tensor for name, tensor in branch.inputs.items()})


class SparingSampler(FakeSampler):
    """Reuses the last prediction in every second step."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[Tensor, ...]] = {}

    def branches(self, state: FakeState) -> tuple[Branch, ...]:
        return () if state.step % 2 else super().branches(state)

    def advance(self, state: FakeState, predictions: tuple[Tensor, ...]) -> FakeState:
        seed = state.request.seed
        self._last[seed] = predictions or self._last[seed]
        return super().advance(state, self._last[seed])


def runner_with(engine: OneRankEngine, sampler: FakeSampler | None = None, rank: int = 0) -> RankJobs:
    parts = RankParts(engine=engine, sampler=sampler or FakeSampler())
    return RankJobs(parts, RankContext(rank=rank, num_ranks=2, device="cpu"))


def plan(*steps: tuple[str, int, Emit | None], drops: tuple[str, ...] = (), ranks: tuple[int, ...] = (0,)) -> StepPlan:
    job_steps = tuple(JobStep(job_id=job_id, step=step, emit=emit) for job_id, step, emit in steps)
    return StepPlan(sequence=0, works=(Work(job_steps=job_steps, ranks=ranks),) if steps else (), drops=drops)


def test_one_forward_serves_several_jobs() -> None:
    engine = OneRankEngine()
    runner = runner_with(engine, TwoBranchSampler())
    requests = {name: FakeRequest(seed=ord(name), num_steps=2) for name in "ab"}
    for name, request in requests.items():
        runner.admit(fake_job(name, request))
    runner.execute(plan(("a", 1, None), ("b", 1, "preview")))
    _, emitted = runner.execute(plan(("a", 2, "final"), ("b", 2, "final")))
    assert engine.num_branches == [4, 4]
    for request, latents in zip(requests.values(), emitted, strict=True):
        assert latents is not None
        torch.testing.assert_close(latents, reference_latents(request), rtol=0, atol=0)
    assert runner.job_ids == ()


def test_a_step_without_branches_advances_without_a_forward() -> None:
    engine = OneRankEngine()
    runner = runner_with(engine, SparingSampler())
    request = FakeRequest(seed=1, num_steps=4)
    runner.admit(fake_job("a", request))
    plans = [plan(("a", step, "final" if step == 4 else None)) for step in range(1, 5)]
    reports, (*_, emitted) = zip(*map(runner.execute, plans), strict=True)
    assert engine.num_branches == [1, 1]
    assert [report.predicted for report in reports] == [True, False, True, False]
    x_L = torch.randn(CONDITIONING_L.shape, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        x_L = x_L - 2 * 0.1 * predict_whole(x_L, CONDITIONING_L)
    torch.testing.assert_close(emitted[0], x_L)


def test_of_a_forward_that_the_engine_refuses_nothing_is_learned() -> None:
    runner = runner_with(OneRankEngine())
    runner.admit(fake_job("refused", FakeRequest(seed=1, num_steps=2, fault="value_error")))
    reports = [runner.execute(plan(("refused", step, None)))[0] for step in (1, 2)]
    assert [len(report.failures) for report in reports] == [1, 0]
    assert not any(report.predicted for report in reports)


def test_a_failed_forward_is_not_the_failure_of_a_job_beside_it_that_needs_none() -> None:
    runner = runner_with(OneRankEngine(), SparingSampler())
    runner.admit(fake_job("sparing", FakeRequest(seed=1, num_steps=2)))
    runner.execute(plan(("sparing", 1, None)))
    runner.admit(fake_job("bad", FakeRequest(seed=2, num_steps=2, fault="value_error")))
    report, emitted = runner.execute(plan(("sparing", 2, "final"), ("bad", 1, None)))
    assert [failure.job_id for failure in report.failures] == ["bad"]
    assert emitted[0] is not None


def test_only_the_lead_rank_emits_and_all_forget() -> None:
    runner = runner_with(OneRankEngine(), rank=1)
    runner.admit(fake_job("a", FakeRequest(seed=1, num_steps=1)))
    runner.admit(fake_job("elsewhere", FakeRequest(seed=1, num_steps=1)))
    _, emitted = runner.execute(plan(("a", 1, "final"), ranks=(0, 1)))
    assert emitted == ()
    assert runner.job_ids == ("elsewhere",)
    runner.execute(plan(("elsewhere", 1, "final"), ranks=(0,)))
    assert not runner.job_ids


def test_drops_come_first() -> None:
    runner = runner_with(OneRankEngine())
    runner.admit(fake_job("a", FakeRequest(seed=1, num_steps=5)))
    runner.execute(plan(("a", 1, None)))
    report, _ = runner.execute(plan(drops=("a", "unknown")))
    assert (runner.job_ids, report.failures) == ((), ())


def test_a_failed_job_is_reported_once_and_sits_out_the_plans_that_still_name_it() -> None:
    runner = runner_with(OneRankEngine())
    runner.admit(fake_job("bad", FakeRequest(seed=1, num_steps=2, bad_begin=True)))
    runner.admit(fake_job("good", FakeRequest(seed=2, num_steps=2)))
    first, _ = runner.execute(plan(("bad", 1, None), ("good", 1, None)))
    second, (nothing, latents) = runner.execute(plan(("bad", 2, "final"), ("good", 2, "final")))
    assert [(f.job_id, str(f.error), f.shared) for f in first.failures] == [
        ("bad", "this request has no beginning", True)
    ]
    assert (second.failures, nothing) == ((), None)
    assert latents is not None
    assert latents.equal(reference_latents(FakeRequest(seed=2, num_steps=2)))


def test_a_failed_preview_leaves_the_state_as_on_the_other_ranks() -> None:
    runner = runner_with(OneRankEngine())
    runner.admit(fake_job("a", FakeRequest(seed=1, num_steps=2, bad_preview=True)))
    report, emitted = runner.execute(plan(("a", 1, "preview")))
    assert emitted == (None,)
    assert [failure.shared for failure in report.failures] == [False]
    _, (latents,) = runner.execute(plan(("a", 2, "final")))
    assert latents is not None
    assert latents.equal(reference_latents(FakeRequest(seed=1, num_steps=2)))


def test_a_value_error_of_the_engine_fails_the_jobs_and_any_other_error_escapes() -> None:
    runner = runner_with(OneRankEngine())
    for name, fault in (("value", "value_error"), ("other", "error")):
        runner.admit(fake_job(name, FakeRequest(seed=1, num_steps=2, fault=fault)))  # type: ignore[arg-type]
    report, _ = runner.execute(plan(("value", 1, None)))
    assert [type(failure.error) for failure in report.failures] == [ValueError]
    with pytest.raises(RuntimeError, match="the engine is broken"):
        runner.execute(plan(("other", 1, None)))


def test_a_job_that_was_never_admitted_is_our_mistake() -> None:
    with pytest.raises(KeyError):
        runner_with(OneRankEngine()).execute(plan(("unknown", 1, None)))


def test_logs_carry_the_job_and_the_request(caplog: pytest.LogCaptureFixture) -> None:
    runner = runner_with(OneRankEngine(), rank=0)
    runner.admit(fake_job("job-1", FakeRequest(seed=1, num_steps=1), request_id="request-1"))
    with caplog.at_level(logging.INFO, logger="engines.gang"):
        runner.execute(plan(("job-1", 1, "final")))
    assert [record.message for record in caplog.records] == ["job begins", "job ends"]
    assert {(r.gang_job_id, r.request_id, r.rank) for r in caplog.records} == {("job-1", "request-1", 0)}  # type: ignore[attr-defined]


def test_close_releases_the_engine() -> None:
    engine = OneRankEngine()
    runner_with(engine).close()
    assert engine.is_closed


def test_a_job_keeps_its_additions_until_it_ends() -> None:
    class Additions(FakeAdditions):
        def for_request(self, request: FakeRequest) -> object:
            held = Held()
            alive.add(held)
            return held

    class Held:
        pass

    alive: WeakSet[Held] = WeakSet()
    context = RankContext(rank=0, num_ranks=2, device="cpu")
    parts = RankParts(engine=OneRankEngine(), sampler=FakeSampler(), additions=Additions(context))
    runner = RankJobs(parts, context)
    for name in "ab":
        runner.admit(fake_job(name, FakeRequest(seed=1, num_steps=2)))
    runner.execute(plan(("a", 1, None)))
    assert len(alive) == 2
    runner.execute(plan(("a", 2, "final")))
    assert len(alive) == 1
    runner.execute(plan(drops=("b",)))
    assert len(alive) == 0
    with pytest.raises(ValueError, match="takes no adapters at run time"):
        runner_with(OneRankEngine()).load_addition("ink")


class SwitchingEngine(OneRankEngine):
    """Changes its weights in every second step."""

    def predict(self, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> tuple[Tensor, ...]:
        if len(self.num_branches) % 2:
            with rank_resources().get(SwitchTimes).measure(torch.device("cpu")):
                strike("")
        return super().predict(branches, ranks)


def test_a_report_says_what_changes_of_weights_took() -> None:
    """Changes before the first job belong to the warm-up."""
    with rank_resources().get(SwitchTimes).measure(torch.device("cpu")):
        strike("")
    runner = runner_with(SwitchingEngine())
    runner.admit(fake_job("a", FakeRequest(seed=1, num_steps=4)))
    reports = [runner.execute(plan(("a", step, None)))[0] for step in (1, 2, 3)]
    assert [report.switch_ms > 0 for report in reports] == [False, True, False]


def test_a_wrong_request_leaves_an_event_and_a_defect_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """A ValueError at a job's first step is of its request; one after steps is ours."""
    runner = runner_with(OneRankEngine())
    runner.admit(fake_job("wrong", FakeRequest(seed=1, num_steps=2, bad_begin=True)))
    runner.admit(fake_job("good", FakeRequest(seed=1, num_steps=2, fault="value_error", fault_step=2)))
    with caplog.at_level(logging.INFO, logger="engines.gang"):
        runner.execute(plan(("wrong", 1, None), ("good", 1, None)))
        runner.execute(plan(("good", 2, None)))
    found = [(r.gang_job_id, r.levelname, bool(r.exc_info)) for r in caplog.records if "fail" in r.message]  # type: ignore[attr-defined]
    assert found == [("wrong", "INFO", False), ("good", "ERROR", True)]
    assert "this request has no beginning" in caplog.text
