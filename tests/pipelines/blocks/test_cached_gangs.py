"""Jobs with a cache on gangs equal those on one rank, also if teams change in the middle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import Tensor

from engines.core.engine import RankContext
from engines.core.tensors import relative_difference
from engines.gang.gang_config import RankParts
from engines.gang.jobs.job import Job
from engines.gang.jobs.rank_jobs import RankJobs
from engines.gang.jobs.scheduler import Scheduler
from engines.torch_engine.engine import TorchEngine
from pipelines.caching import computed_steps
from pipelines.checkpoint import Checkpoint
from pipelines.request import MediaRequest
from pipelines.run import load_pipeline
from tests.engines.support.gloo import gang
from tests.pipelines.lora.support.tiny_lora import request_of

TOLERANCE = 1e-4
NUM_STEPS, NUM_LATE_STEPS, LATE = 12, 4, 6
"""The second job begins at step 7 of the first, which moves while it makes no forward."""


def requests_of(folder: Path) -> tuple[MediaRequest, MediaRequest]:
    first = replace(request_of(folder), num_inference_steps=NUM_STEPS, true_cfg_scale=2.0, cache="fast")
    return first, replace(first, num_inference_steps=NUM_LATE_STEPS, seed=6, cache="off")


def jobs_of(folder: Path) -> list[Job]:
    encoder = Checkpoint(folder).text_encoder()
    return [
        Job(
            job_id="ab"[number],
            request=request,
            conditioning=encoder.encode(request),
            num_steps=request.num_inference_steps,
            estimates_s={1: 1.0, 2: 0.95, 4: 0.9},
        )
        for number, request in enumerate(requests_of(folder))
    ]


def run_elastically(folder: Path, strategy: str) -> tuple[dict[str, Tensor], dict[str, list[int]], list[bool]]:
    """Return this rank's emitted latents, the ranks of each step, and which steps of the first job made forwards."""
    checkpoint, rank, num_ranks = Checkpoint(folder), dist.get_rank(), dist.get_world_size()
    engine = TorchEngine(checkpoint.denoiser(), strategy=strategy)
    runner = RankJobs(
        RankParts(engine=engine, sampler=checkpoint.sampler()),
        RankContext(rank=rank, num_ranks=num_ranks, device="cpu"),
    )
    scheduler = Scheduler(
        num_ranks=num_ranks, max_running_jobs=2, elastic=len(engine.team_sizes) > 1, team_sizes=engine.team_sizes
    )
    jobs = jobs_of(folder)
    emitted: dict[str, Tensor] = {}
    team_sizes: dict[str, list[int]] = {"a": [], "b": []}
    predicted: list[bool] = []
    for number in range(NUM_STEPS + NUM_LATE_STEPS + 1):
        for job in {0: jobs[:1], LATE: jobs[1:]}.get(number, ()):
            runner.admit(job)
            scheduler.add(job)
        if (plan := scheduler.next_plan()) is None:
            break
        report, latents = runner.execute(plan)
        assert report.failures == ()
        emitted |= {step.job_id: x["latents"] for step, x in zip(plan.emits_of(rank), latents, strict=True)}
        for work in plan.works:
            team_sizes[work.job_ids[0]].append(work.num_ranks)
            if rank in work.ranks and work.job_ids == ("a",):
                predicted.append(report.predicted)
    runner.close()
    return emitted, team_sizes, predicted


@pytest.mark.parametrize(
    ("name", "num_ranks", "strategy"), [("flux", 2, "ulysses"), ("wan", 2, "guidance"), ("wan", 4, "ring")]
)
def test_a_job_that_moves_while_it_makes_no_forwards(
    name: str, num_ranks: int, strategy: str, tiny_flux: Path, tiny_wan: Path
) -> None:
    folder = {"flux": tiny_flux, "wan": tiny_wan}[name]
    by_rank = gang(num_ranks).run(run_elastically, folder, strategy)
    computed = computed_steps("fast", NUM_STEPS)
    assert not any(computed[LATE - 1 : LATE + 1])
    sizes = by_rank[0][1]["a"]
    assert sizes[LATE - 1] > sizes[LATE], "its team changed in between"
    assert by_rank[0][2] == [is_computed for is_computed, _ in zip(computed, by_rank[0][2], strict=False)]
    latents = {job_id: x for emitted, *_ in by_rank for job_id, x in emitted.items()}
    pipeline = load_pipeline(Checkpoint(folder))
    for job_id, request in zip("ab", requests_of(folder), strict=True):
        assert relative_difference(latents[job_id], pipeline.denoise(request)["latents"]) <= TOLERANCE
    off = pipeline.denoise(replace(requests_of(folder)[0], cache="off"))["latents"]
    assert relative_difference(latents["a"], off) > 10 * TOLERANCE
