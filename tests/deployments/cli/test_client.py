"""What the command line's own client makes of what a server tells it."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments.cli.client import Client, RefusedError, Result
from deployments.studio.interface import Progress
from engines.gang.errors import GangBrokenError
from pipelines.request import MediaRequest
from tests.deployments.api.conftest import build, serving
from tests.deployments.support.fake_studio import FakeStudio


def test_a_picture_is_streamed(tmp_path: Path) -> None:
    with serving(build(FakeStudio(), tmp_path)) as url, Client(url) as client:
        *steps, result = client.picture({"prompt": "a", "seed": 5, "num_inference_steps": 3})
    assert [step.step for step in steps if isinstance(step, Progress)] == [1, 2, 3]
    assert isinstance(result, Result)
    assert (result.seed, result.data[:4]) == (5, b"\x89PNG")


@pytest.mark.parametrize("failing_step", [0, 2], ids=["before the stream", "within it"])
def test_why_a_picture_failed_is_told(tmp_path: Path, failing_step: int) -> None:
    def fail(request: MediaRequest, step: int = 0) -> None:
        if step == failing_step:
            raise GangBrokenError("rank 0 died")

    studio = FakeStudio(before=fail, at_step=fail)
    with (
        serving(build(studio, tmp_path)) as url,
        Client(url) as client,
        pytest.raises(RefusedError, match="rank 0 died"),
    ):
        list(client.picture({"prompt": "a"}))
