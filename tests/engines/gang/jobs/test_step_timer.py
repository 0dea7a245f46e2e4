"""A rank reports how long steps took on an asynchronous device; a test sets its clock and device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engines.core.engine import EagerEngine, RankContext
from engines.core.model import Branch
from engines.gang.gang_config import RankParts
from engines.gang.jobs.rank_jobs import RankJobs
from engines.gang.jobs.step_plan import JobStep, Move, StepPlan, Work
from engines.gang.jobs.step_timer import CudaStepTimer, StepTimer, step_timer
from tests.engines.gang.support.fakes import FakeRequest, FakeSampler, FakeState, fake_job

LAUNCH_S, SHORT_S, LONG_S = 0.002, 0.03, 4.0
NUM_STEPS = 6


@dataclass
class Device:
    """The rank's clock, and the time at which the device will have finished its work."""

    now_s: float = 0.0
    ends_s: float = 0.0

    def launch(self, step_s: float) -> None:
        self.now_s += LAUNCH_S
        self.ends_s = max(self.now_s, self.ends_s) + step_s

    def wait(self) -> None:
        self.now_s = max(self.now_s, self.ends_s)


class SetMark:
    """Stands for ``torch.cuda.Event`` on that device."""

    def __init__(self, device: Device) -> None:
        self._device, self._at_s = device, 0.0

    def record(self) -> None:
        self._at_s = max(self._device.now_s, self._device.ends_s)

    def query(self) -> bool:
        return self._at_s <= self._device.now_s

    def synchronize(self) -> None:
        self._device.now_s = max(self._device.now_s, self._at_s)

    def elapsed_time(self, end: SetMark, /) -> float:
        return 1e3 * (end._at_s - self._at_s)


class DeviceEngine(EagerEngine):
    """Gives the device the seconds of work that the request names."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def predict(self, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> tuple[Tensor, ...]:
        self._device.launch(float(branches[0].inputs["step_s"]))
        return tuple(branch.inputs["x_L"] for branch in branches)


class DeviceSampler(FakeSampler):
    def __init__(self, device: Device) -> None:
        self._device = device

    def branches(self, state: FakeState) -> tuple[Branch, ...]:
        return (Branch(inputs={"x_L": state.x_L, "step_s": torch.tensor(state.request.step_s)}, module="transformer"),)

    def latents(self, state: FakeState) -> Tensor:
        self._device.wait()
        return state.x_L


class DeviceRank:
    """A rank with such a device. ``told_ms`` has the reported times by sequence of the plan."""

    def __init__(self) -> None:
        self.device = Device()
        parts = RankParts(engine=DeviceEngine(self.device), sampler=DeviceSampler(self.device))
        timer = CudaStepTimer(lambda: SetMark(self.device), lambda: self.device.now_s)
        self._jobs = RankJobs(parts, RankContext(rank=0, num_ranks=1, device="cpu"), timer)
        self.told_ms: dict[int, float] = {}
        self.running_ms: list[float] = []
        self.moved_ms: list[float] = []
        self._steps: dict[str, int] = {}

    def admit(self, job_id: str, step_s: float) -> None:
        self._jobs.admit(fake_job(job_id, FakeRequest(seed=1, num_steps=NUM_STEPS, step_s=step_s)))
        self._steps[job_id] = 0

    def step(self, job_id: str, at_s: float) -> dict[int, float]:
        """Run the job's next step, called at ``at_s`` or when the rank is free. Return the reported times."""
        self.device.now_s = max(self.device.now_s, at_s)
        self._steps[job_id] += 1
        step = JobStep(job_id=job_id, step=self._steps[job_id], emit="final" if self._is_last(job_id) else None)
        sequence = sum(self._steps.values())
        report, _ = self._jobs.execute(StepPlan(sequence=sequence, works=(Work(job_steps=(step,), ranks=(0,)),)))
        assert not set(report.ended_ms) & set(self.told_ms), "each step once"
        self.running_ms.append(report.running_ms)
        self.told_ms |= report.ended_ms
        return dict(report.ended_ms)

    def drop(self, job_id: str, at_s: float) -> dict[int, float]:
        return self._aside(StepPlan(sequence=-1, drops=(job_id,)), at_s)

    def give_away(self, job_id: str, at_s: float) -> dict[int, float]:
        return self._aside(StepPlan(sequence=-1, moves=(Move(job_id=job_id, source=0, ranks=(1,)),)), at_s)

    def _aside(self, plan: StepPlan, at_s: float) -> dict[int, float]:
        """Run a plan in which this rank has no work. Return the reported times."""
        self.device.now_s = max(self.device.now_s, at_s)
        report, _ = self._jobs.execute(plan)
        self.moved_ms.append(report.move_ms)
        return dict(report.ended_ms)

    def _is_last(self, job_id: str) -> bool:
        return self._steps[job_id] == NUM_STEPS


def launched(*step_s: float) -> dict[int, Any]:
    """Return the expected milliseconds of steps from 1 on; the device idled before the first, so its launch counts."""
    took_s = [step_s[0] + LAUNCH_S, *step_s[1:]]
    return {number: pytest.approx(1e3 * each) for number, each in enumerate(took_s, 1)}


@pytest.mark.parametrize("step_s", [SHORT_S, LONG_S])
@pytest.mark.parametrize("lead_share", [0.1, 0.25, 0.9])
def test_a_step_takes_what_the_device_does_however_late_its_call_comes(step_s: float, lead_share: float) -> None:
    """Each step is sent when ``lead_share`` of the one before it is left."""
    rank = DeviceRank()
    rank.admit("a", step_s)
    for _ in range(NUM_STEPS):
        rank.step("a", at_s=rank.device.ends_s - lead_share * step_s)
    assert rank.told_ms == launched(*[step_s] * NUM_STEPS)


def test_a_step_is_told_of_with_the_next_and_the_last_at_once() -> None:
    rank = DeviceRank()
    rank.admit("a", SHORT_S)
    told = [rank.step("a", at_s=0.0) for _ in range(NUM_STEPS)]
    assert [sorted(each) for each in told] == [[], [1], [2], [3], [4], [5, 6]]


def test_a_report_says_how_long_the_device_has_been_in_the_step() -> None:
    """The first launch is part of its step. Later steps begin with the reports, and the last one has ended."""
    rank = DeviceRank()
    rank.admit("a", SHORT_S)
    for _ in range(NUM_STEPS):
        rank.step("a", at_s=0.0)
    expected = [1e3 * LAUNCH_S, *[0.0] * (NUM_STEPS - 2), 1e3 * SHORT_S]
    assert rank.running_ms == pytest.approx(expected)


def test_calls_that_take_longer_than_the_rest_of_the_step_before_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.engines.gang.jobs.test_step_timer.LAUNCH_S", 2 * SHORT_S)
    rank = DeviceRank()
    rank.admit("a", SHORT_S)
    rank.step("a", at_s=0.0)
    rank.step("a", at_s=0.0)  # launched while the first runs, which ends in the middle
    assert rank.running_ms == pytest.approx([1e3 * 2 * SHORT_S, 1e3 * SHORT_S])


def test_the_begin_of_a_job_is_no_part_of_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the report of the next step, which comes as this one ends, would include the begin."""
    rank = DeviceRank()

    begin = DeviceSampler.begin

    def slow_begin(sampler: DeviceSampler, *given: Any) -> FakeState:
        rank.device.now_s += LONG_S
        return begin(sampler, *given)

    monkeypatch.setattr(DeviceSampler, "begin", slow_begin)
    rank.admit("a", SHORT_S)
    rank.step("a", at_s=0.0)
    assert rank.running_ms == pytest.approx([1e3 * LAUNCH_S])


def test_what_a_device_idles_belongs_to_no_step() -> None:
    rank = DeviceRank()
    rank.admit("a", SHORT_S)
    for _ in range(NUM_STEPS):
        rank.step("a", at_s=rank.device.ends_s + 100.0)
    assert list(rank.told_ms.values()) == pytest.approx([1e3 * (SHORT_S + LAUNCH_S)] * NUM_STEPS)


def test_jobs_in_turns_have_each_its_own_time() -> None:
    rank = DeviceRank()
    for job_id, step_s in (("long", LONG_S), ("short", SHORT_S)):
        rank.admit(job_id, step_s)
    for _ in range(NUM_STEPS):
        for job_id in ("long", "short"):
            rank.step(job_id, at_s=rank.device.ends_s - 0.1)
    expected = launched(*[LONG_S, SHORT_S] * NUM_STEPS)
    last = 2 * NUM_STEPS  # the device was idle at its turn: the step before handed out its latents
    assert rank.told_ms == expected | {last: pytest.approx(1e3 * (SHORT_S + LAUNCH_S))}


def test_who_drops_a_job_tells_of_its_step_there_and_then() -> None:
    """The next call may come much later, and the step's time is billed."""
    rank = DeviceRank()
    rank.admit("a", LONG_S)
    rank.step("a", at_s=0.0)
    assert rank.drop("a", at_s=1.0) == launched(LONG_S)


@pytest.fixture
def communicator() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


def test_who_gives_a_job_away_tells_of_its_step_there_and_then(communicator: None) -> None:
    """Another rank may finish the job before this rank is called again."""
    rank = DeviceRank()
    rank.admit("a", LONG_S)
    rank.step("a", at_s=0.0)
    assert rank.give_away("a", at_s=1.0) == launched(LONG_S)


def test_what_a_move_takes_begins_as_the_step_before_has_ended(
    communicator: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends when the device has done the work of the move."""
    rank = DeviceRank()
    monkeypatch.setattr("engines.gang.jobs.rank_jobs.time.perf_counter", lambda: rank.device.now_s)
    monkeypatch.setattr("engines.gang.jobs.rank_jobs.transfer", lambda state, **_: rank.device.launch(SHORT_S))
    for job_id in ("a", "b"):
        rank.admit(job_id, LONG_S)
        rank.step(job_id, at_s=0.0)
    rank.give_away("a", at_s=1.0)
    rank.drop("b", at_s=1.0)
    assert rank.moved_ms == [pytest.approx(1e3 * (LAUNCH_S + SHORT_S)), 0.0]


def test_steps_of_a_host_are_over_with_their_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    timer, times_s = StepTimer(), iter([10.0, 10.5])
    monkeypatch.setattr("engines.gang.jobs.step_timer.time.perf_counter", lambda: next(times_s))
    timer.arrive()
    timer.begin(7)
    timer.end()
    timer.wait(0)
    assert timer.ended_ms() == {7: pytest.approx(500.0)}
    assert timer.ended_ms() == {}, "there is nothing else to tell"


def test_a_rank_on_a_cpu_is_its_own_device() -> None:
    assert type(step_timer(torch.device("cpu"))) is StepTimer
