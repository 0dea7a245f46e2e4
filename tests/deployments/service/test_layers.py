"""All files of a decoded picture reach the client."""

from __future__ import annotations

import pytest

from deployments.service.interface import Media, Output
from deployments.service.run import Run
from deployments.stages.common import Decoded
from deployments.stages.measured_times import DecodeTimes
from engines.gang.jobs.job import JobDone
from pipelines.request import NO_PICTURES
from tests.deployments.service.support.set_stages import Stages
from tests.deployments.support.fake_service import LAYERS

DONE = JobDone(job_id="j", latents="latents", queue_s=0.0, denoise_s=1.0, was_warm=True)  # type: ignore[arg-type]


async def test_a_job_may_give_several_files() -> None:
    stages = Stages([DONE])
    stages.decoded = Decoded(data=b"low", further=(b"middle", b"high"), thumbnail=b"", decode_s=0.1)
    request, output = LAYERS.request(model="m", num_layers=3), Output(format="png")
    times = DecodeTimes()
    one = Run(
        stages=stages,  # type: ignore[arg-type]
        request=request,
        output=output,
        pictures=NO_PICTURES,
        exclusive=False,
        wait_s=60.0,
        decode_times=times,
    )
    *_, media = [event async for event in one.events()]
    assert isinstance(media, Media)
    assert media.files == (b"low", b"middle", b"high")
    assert times.get(("png", 3 * request.width * request.height)) == pytest.approx(0.1)
    assert times.scaled_s(("png", request.width * request.height)) == pytest.approx(0.1 / 3)
