"""A rank that does not enqueue leaves the others inside a collective for ever: the gang must end them."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import torch

from engines.gang.config import GangConfig
from engines.gang.errors import GangBrokenError
from engines.gang.gang import Gang
from engines.gang.job import Job, JobDone
from tests.engines.gang.support.helpers import alive, eventually, group_for
from tests.engines.tensorrt_engine.support.faulty_rank import NUM_STEPS, BuildFaulty
from tests.engines.tensorrt_engine.support.zoo import reference, wan_inputs, wan_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

STEP_DEADLINE_S = 6.0
CONFIG = GangConfig(num_ranks=2, cpus_per_rank=0.1, step_deadline_s=STEP_DEADLINE_S, start_deadline_s=180.0)


def job(name: str) -> Job:
    return Job(job_id=name, request=0, conditioning=None, num_steps=NUM_STEPS, shape="shape")


async def latents(gang: Gang, name: str) -> torch.Tensor:
    *_, done = [event async for event in gang.submit(job(name))]
    assert isinstance(done, JobDone)
    made: torch.Tensor = await done.latents
    return made


def expected() -> torch.Tensor:
    model, inputs = wan_model(), wan_inputs(1, 3, 6, 10)
    for _ in range(NUM_STEPS):
        inputs["hidden_states"] = inputs["hidden_states"] - 0.1 * reference(model, inputs)
    return inputs["hidden_states"]


@pytest.mark.parametrize(
    ("fault", "cause", "told", "within_s"),
    [
        ("refuses", "error", "rank 1 failed: .*could not enqueue the step", STEP_DEADLINE_S - 1),
        pytest.param(
            "hangs",
            "deadline",
            r"ranks \[0, 1\] did not finish a step \(\d of job hangs",
            STEP_DEADLINE_S + 5,
            marks=pytest.mark.slow,
        ),
    ],
)
async def test_a_rank_that_fails_to_enqueue_hangs_nobody(
    ray_cluster: None, tmp_path: Path, fault: str, cause: str, told: str, within_s: float
) -> None:
    """Over at once when TensorRT refuses, at the step's deadline when its call hangs."""
    with group_for(CONFIG) as group:
        gang = await Gang.start(CONFIG, BuildFaulty(folder=tmp_path, fault=fault), placement_group=group)
        await latents(gang, "warm")  # from here on a step has its own deadline, not that of a first one
        begun_s = time.monotonic()
        with pytest.raises(GangBrokenError, match=told) as caught:
            await latents(gang, fault)
        assert time.monotonic() - begun_s < within_s
        assert (caught.value.cause, caught.value.in_flight) == (cause, True)
        await eventually(lambda: not alive(info.pid for info in gang.infos), within_s=5.0)


@pytest.mark.slow
async def test_the_gang_after_a_broken_one_is_right(ray_cluster: None, tmp_path: Path) -> None:
    with group_for(CONFIG) as group:
        gang = await Gang.start(CONFIG, BuildFaulty(folder=tmp_path, fault="refuses"), placement_group=group)
        await latents(gang, "warm")
        with pytest.raises(GangBrokenError):
            await latents(gang, "refuses")
        again = await Gang.start(CONFIG, BuildFaulty(folder=tmp_path), placement_group=group)
        given = await asyncio.wait_for(latents(again, "again"), timeout=60)
        await again.close()
    torch.testing.assert_close(given, expected(), rtol=1e-4, atol=1e-4)
