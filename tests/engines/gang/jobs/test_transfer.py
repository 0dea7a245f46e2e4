"""States of real jobs change ranks between steps: they arrive unchanged, and so do the pictures at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engines.core.engine import RankContext
from engines.core.packing import ALIGNMENT
from engines.core.tensors import relative_difference
from engines.gang.gang_config import RankParts
from engines.gang.jobs.job import Job
from engines.gang.jobs.rank_jobs import RankJobs, transfer, warm_up_transfers
from engines.gang.jobs.scheduler import Scheduler
from engines.torch_engine.engine import TorchEngine
from pipelines.checkpoint import Checkpoint
from pipelines.run import PlainEngine
from pipelines.size import Size
from tests.engines.support.gloo import gang
from tests.pipelines.support.checkpoints import tiny

CPU = torch.device("cpu")
HARDLY_FASTER = {1: 1.0, 2: 0.95, 4: 0.94}
"""Estimated step times by team size: it pays to run jobs side by side."""
NUM_STEPS = (7, 3, 4)
"""Steps of jobs a, b and c; a begins two steps early, so that teams go 4, 2 + 1 + 1, 2 + 2, 4."""


@pytest.fixture(scope="module", params=["flux", "wan"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    makers: dict[str, Callable[[Path], Path]] = {"flux": tiny.flux, "wan": tiny.wan}
    return makers[request.param](tmp_path_factory.mktemp(request.param))


def test_jobs_whose_team_changes_give_the_latents_of_one_rank(folder: Path) -> None:
    by_rank = gang(4).run(run_elastically, folder)
    team_sizes = by_rank[0][1]
    assert team_sizes == {"a": [4, 4, 2, 2, 2, 2, 4], "b": [1, 1, 1], "c": [1, 1, 1, 2]}
    latents = {job_id: x for emitted, _ in by_rank for job_id, x in emitted.items()}
    for number, job_id in enumerate("abc"):
        assert relative_difference(latents[job_id], alone(folder, number)) <= 1e-5


def jobs_of(folder: Path) -> list[Job]:
    checkpoint = Checkpoint(folder)
    encoder = checkpoint.text_encoder()
    size = Size(width=32, height=32, num_frames=5 if checkpoint.defaults.kind == "video" else None)
    jobs = []
    for number, num_steps in enumerate(NUM_STEPS):
        guided = max(checkpoint.defaults.true_cfg_scale, 2.0)
        own = {"seed": number, "prompt": f"a star and {number} circles", "num_inference_steps": num_steps}
        request = checkpoint.defaults.request(size, true_cfg_scale=guided, **own)
        job_id, conditioning = "abc"[number], encoder.encode(request)
        job = Job(job_id=job_id, request=request, conditioning=conditioning, num_steps=num_steps, shape=size)
        jobs.append(replace(job, estimates_s=HARDLY_FASTER))
    return jobs


def alone(folder: Path, number: int) -> Tensor:
    checkpoint, job = Checkpoint(folder), jobs_of(folder)[number]
    engine = PlainEngine(model=checkpoint.denoiser())
    sampler = checkpoint.sampler()
    state = sampler.begin(job.request, job.conditioning)
    for _ in range(job.num_steps):
        state = sampler.advance(state, engine.predict(sampler.branches(state)))
    latents: Tensor = sampler.latents(state)["latents"]
    return latents


def run_elastically(folder: Path) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
    """Run the same plans on every rank. Return the latents that it emits and the team size of each step."""
    checkpoint, rank = Checkpoint(folder), dist.get_rank()
    engine = TorchEngine(checkpoint.denoiser(), strategy="ulysses")
    parts = RankParts(engine=engine, sampler=checkpoint.sampler())
    runner = RankJobs(parts, RankContext(rank=rank, num_ranks=4, device="cpu"))
    scheduler = Scheduler(num_ranks=4, max_running_jobs=4, elastic=True)
    late = jobs_of(folder)
    emitted: dict[str, Tensor] = {}
    team_sizes: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    for number in range(100):
        for job in {0: late[:1], 2: late[1:]}.get(number, ()):
            runner.admit(job)
            scheduler.add(job)
        if (plan := scheduler.next_plan()) is None:
            break
        report, latents = runner.execute(plan)
        assert report.failures == ()
        for step, x in zip(plan.emits_of(rank), latents, strict=True):
            assert x is not None
            emitted[step.job_id] = x["latents"]
        for work in plan.works:
            team_sizes[work.job_ids[0]].append(work.num_ranks)
    assert runner.job_ids == ()
    runner.close()
    return emitted, team_sizes


SHARED = torch.arange(5, dtype=torch.int16)
STATE: dict[str, Any] = {
    "bfloat16": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "scalar": torch.tensor(3.25, dtype=torch.float64),
    "strided": torch.arange(12.0).view(3, 4).t(),
    "empty": torch.empty(0, 4),
    "twice": [SHARED, SHARED],
    "plain": ("text", 7, None),
}


def test_every_kind_of_value_arrives_once() -> None:
    for rank, arrived in enumerate(gang(2).run(transfer_state)):
        for name in ("bfloat16", "scalar", "strided", "empty"):
            assert arrived[name].dtype == STATE[name].dtype
            assert torch.equal(arrived[name], STATE[name]), (rank, name)
        assert arrived["twice"][0] is arrived["twice"][1]
        assert arrived["plain"] == STATE["plain"]


def transfer_state() -> Any:
    rank = dist.get_rank()
    return transfer(STATE if rank == 1 else None, source=1, rank=rank, device=CPU)


def test_a_rehearsal_sends_skeleton_and_tensors_from_every_rank() -> None:
    assert gang(2).run(warm_up_sources) == [[0, 1], [0, 1]]


def warm_up_sources() -> list[int]:
    """Return the source rank of each tensor that the warm-up of transfers sends."""
    sources: list[int] = []
    broadcast = dist.broadcast

    def noted(tensor: Tensor, src: int, *args: Any, **options: Any) -> Any:
        sources.append(src)
        return broadcast(tensor, src, *args, **options)

    with patch.object(dist, "broadcast", noted):
        warm_up_transfers(RankContext(rank=dist.get_rank(), num_ranks=2, device="cpu"))
    return sources


def test_one_rank_rehearses_nothing() -> None:
    with patch.object(dist, "broadcast_object_list", side_effect=AssertionError):
        warm_up_transfers(RankContext(rank=0, num_ranks=1, device="cpu"))


def test_a_state_without_tensors() -> None:
    assert gang(2).run(transfer_number) == [5, 5]


def transfer_number() -> Any:
    return transfer(5, source=0, rank=dist.get_rank(), device=CPU)


def test_what_cannot_be_pickled_is_told_to_every_rank() -> None:
    for told in gang(2).run(transfer_function):
        assert "pickle" in told


def transfer_function() -> str:
    try:
        transfer(lambda: None, source=0, rank=dist.get_rank(), device=CPU)
    except Exception as error:
        return str(error)
    return "no error"


def test_alignment_fits_every_dtype() -> None:
    assert ALIGNMENT % torch.complex128.itemsize == 0
