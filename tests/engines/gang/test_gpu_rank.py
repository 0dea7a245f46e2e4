"""On a GPU: how far steps run ahead, their reported times, and the communicator over NCCL."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing

from engines.core.engine import EagerEngine, RankContext
from engines.core.model import Branch
from engines.gang.communicator import Communicator
from engines.gang.gang_config import RankParts
from engines.gang.jobs.rank_jobs import RankJobs
from engines.gang.jobs.step_plan import JobStep, StepPlan, Work
from tests.engines.gang.support.fakes import FakeRequest, FakeSampler, FakeState, fake_job

pytestmark = pytest.mark.gpu

NUM_SLEEP_CYCLES = 1_000_000_000
"""About 0.5 s of a GPU at 2 GHz: the host returns much sooner."""


class SleepingEngine(EagerEngine):
    """Keeps the device busy and returns at once, like a captured step. ``ends`` has an event for each step."""

    def __init__(self) -> None:
        self.ends: list[torch.cuda.Event] = []

    def predict(self, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> tuple[Tensor, ...]:
        torch.cuda._sleep(NUM_SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        self.ends.append(torch.cuda.current_stream().record_event())
        return tuple(branch.inputs["x_L"] for branch in branches)


def step(number: int, *, is_last: bool = False) -> StepPlan:
    work = Work(job_steps=(JobStep(job_id="a", step=number, emit="final" if is_last else None),), ranks=(0,))
    return StepPlan(sequence=number, works=(work,))


@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")
def test_a_step_is_queued_while_the_one_before_it_runs() -> None:
    engine = SleepingEngine()
    runner = RankJobs(
        RankParts(engine=engine, sampler=FakeSampler()), RankContext(rank=0, num_ranks=1, device="cuda:0")
    )
    conditioning_L = torch.zeros(8)
    runner.admit(fake_job("a", FakeRequest(seed=1, num_steps=9), conditioning=conditioning_L))
    torch.cuda.synchronize()
    over = []
    for number in range(1, 4):
        runner.execute(step(number))
        over.append([end.query() for end in engine.ends])  # type: ignore[no-untyped-call]
    assert over == [[False], [True, False], [True, True, False]], (
        "each step waits for the one before it, not for itself"
    )


CAPTURED_SLEEP_CYCLES = 100_000_000
NUM_CAPTURED_STEPS, NUM_WARM_UPS = 28, 10


class CapturedEngine(EagerEngine):
    """Replays a captured graph that keeps the device busy. ``marks`` has the events around each step."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            torch.cuda._sleep(CAPTURED_SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        self.marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def predict(self, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> tuple[Tensor, ...]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        self._graph.replay()
        end.record()
        self.marks.append((begin, end))
        return tuple(branch.inputs["x_L"] for branch in branches)

    def took_ms(self) -> list[float]:
        """Wait for the device. Return the milliseconds of each step, and forget them."""
        torch.cuda.synchronize()
        took_ms = [begin.elapsed_time(end) for begin, end in self.marks]
        self.marks.clear()
        return took_ms


class WaitingSampler(FakeSampler):
    def latents(self, state: FakeState) -> Tensor:
        """Wait for the device, like real latents, which are copied to the host."""
        torch.cuda.synchronize()
        return state.x_L


@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")
@pytest.mark.parametrize("gap_share", [0.0, 0.8, 1.5])
def test_ranks_tell_what_captured_steps_took_however_late_their_calls_come(gap_share: float) -> None:
    """Each call comes ``gap_share`` of a step after the one before began; with 1.5 the device idles between."""
    engine = CapturedEngine()
    for _ in range(NUM_WARM_UPS):
        engine.predict((), (0,))
    gap_s = gap_share * engine.took_ms()[-1] / 1e3
    parts = RankParts(engine=engine, sampler=WaitingSampler())
    runner = RankJobs(parts, RankContext(rank=0, num_ranks=1, device="cuda:0"))
    request = FakeRequest(seed=1, num_steps=NUM_CAPTURED_STEPS)
    runner.admit(fake_job("a", request, conditioning=torch.zeros(8)))
    told_ms: dict[int, float] = {}
    began_s = time.perf_counter()
    for number in range(1, NUM_CAPTURED_STEPS + 1):
        report, _ = runner.execute(step(number, is_last=number == NUM_CAPTURED_STEPS))
        told_ms |= report.ended_ms
        time.sleep(gap_s if number < NUM_CAPTURED_STEPS else 0.0)
    wall_ms = 1e3 * (time.perf_counter() - began_s)
    assert sorted(told_ms) == list(range(1, NUM_CAPTURED_STEPS + 1))
    assert sum(told_ms.values()) == pytest.approx(sum(engine.took_ms()), rel=0.02)
    if gap_share < 1:
        assert sum(told_ms.values()) == pytest.approx(wall_ms, rel=0.02), "the device was never idle"
    else:
        assert sum(told_ms.values()) < 0.8 * wall_ms


def member(rank: int, pipe: Connection) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    communicator = Communicator(rank=rank, num_ranks=2, device=device, timeout_s=60.0)
    if rank == 0:
        address = communicator.open_store("127.0.0.1")
        pipe.send(address)
    else:
        address = pipe.recv()
    communicator.join(address)
    total = torch.full((), rank + 1.0, device=device)
    dist.all_reduce(total)
    communicator.leave()
    assert total.item() == 3.0


def single() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    communicator = Communicator(rank=0, num_ranks=1, device=device, timeout_s=60.0)
    communicator.join(communicator.open_store("127.0.0.1"))
    values: list[object] = [None]
    dist.all_gather_object(values, "later")
    communicator.leave()
    assert values == ["later"]


def test_a_single_gpu_may_exchange_with_itself() -> None:
    """Building the rank makes its communicator."""
    process = multiprocessing.get_context("spawn").Process(target=single)
    process.start()
    process.join(120)
    assert process.exitcode == 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_join_over_nccl() -> None:
    context = multiprocessing.get_context("spawn")
    pipes = context.Pipe()
    members = [context.Process(target=member, args=(rank, pipes[rank])) for rank in range(2)]
    for process in members:
        process.start()
    for process in members:
        process.join(120)
    assert [process.exitcode for process in members] == [0, 0]
