"""What only a GPU shows: the pace of steps in flight, and the communicator over NCCL."""

from __future__ import annotations

from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing

from engines.core.model import Branch
from engines.core.rank import RankContext
from engines.gang.config import RankParts
from engines.gang.jobs.rank_jobs import RankJobs
from engines.gang.jobs.step_plan import JobStep, StepPlan, Work
from engines.gang.ranks.communicator import Communicator
from tests.engines.gang.support.fakes import FakeRequest, FakeSampler, fake_job

pytestmark = pytest.mark.gpu

NUM_SLEEP_CYCLES = 1_000_000_000
"""About 0.5 s of a GPU at 2 GHz: the host is much sooner back."""


class SleepingEngine:
    """Keeps the device busy, and returns at once, as a captured step does. ``ends`` are those of its steps."""

    team_sizes = (1,)
    was_warm = True

    def __init__(self) -> None:
        self.ends: list[torch.cuda.Event] = []

    def predict(self, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> tuple[Tensor, ...]:
        torch.cuda._sleep(NUM_SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        self.ends.append(torch.cuda.current_stream().record_event())  # type: ignore[no-untyped-call]
        return tuple(branch.inputs["x_L"] for branch in branches)

    def close(self) -> None: ...


def step(number: int) -> StepPlan:
    work = Work(job_steps=(JobStep(job_id="a", step=number),), ranks=(0,))
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
        over.append([end.query() for end in engine.ends])
    assert over == [[False], [True, False], [True, True, False]], (
        "each step waits for the one before it, not for itself"
    )


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
