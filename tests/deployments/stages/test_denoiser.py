"""What a denoiser says of a job, around a gang that is not there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import numpy as np

from deployments.stages.common import Encoded, EncodingDone
from deployments.stages.denoiser import Denoiser
from engines.gang.errors import QueueFullError
from engines.gang.job import Job, StepDone
from tests.deployments.support.fake_studio import PICTURES

ENCODED = Encoded(skeleton=b"", message=np.zeros(0, np.uint8), encode_s=0.5)
STEPS = [StepDone(job_id="j", step=step, num_steps=2, step_ms=1.0, num_ranks=2) for step in (1, 2)]


async def events_of(*acts: StepDone | Exception) -> list[tuple[Any, ...]]:
    async def submit_grouped(job: Job, *, every_s: float) -> AsyncGenerator[tuple[StepDone, ...]]:
        for act in acts:
            if isinstance(act, Exception):
                raise act
            yield (act,)

    denoiser = object.__new__(Denoiser)
    denoiser._gang = SimpleNamespace(submit_grouped=submit_grouped)  # type: ignore[assignment]
    encoded: asyncio.Future[Encoded] = asyncio.get_running_loop().create_future()
    encoded.set_result(ENCODED)
    request = PICTURES.request(model="m", prompt="a")
    return [group async for group in denoiser.denoise("j", request, [encoded])]  # type: ignore[list-item]


async def test_the_first_group_says_how_long_the_encoding_took() -> None:
    assert await events_of(*STEPS) == [(EncodingDone(encode_s=0.5), STEPS[0]), (STEPS[1],)]


async def test_a_refusal_is_told_and_not_raised() -> None:
    """Serve would log a traceback for each."""
    ((refusal,),) = await events_of(QueueFullError(4, 1.5))
    assert isinstance(refusal, QueueFullError)
    assert (refusal.num_waiting, refusal.retry_after_s) == (4, 1.5)
