"""What the command line's own client makes of what a server tells it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from deployments.cli.client import Client, RefusedError, Result, root_of
from deployments.studio.interface import Progress
from engines.gang.errors import GangBrokenError
from pipelines.request import MediaRequest
from tests.deployments.api.conftest import build, serving
from tests.deployments.support.commands import assert_one_line, troupe
from tests.deployments.support.fake_studio import FakeStudio, colour
from tests.deployments.support.live import pixels_of


def test_a_picture_is_streamed(tmp_path: Path) -> None:
    with serving(build(FakeStudio(), tmp_path)) as url, Client(url) as client:
        *steps, result = client.picture({"prompt": "a", "seed": 5, "num_inference_steps": 3})
    assert [step.step for step in steps if isinstance(step, Progress)] == [1, 2, 3]
    assert isinstance(result, Result)
    assert (result.seed, result.data[:4]) == (5, b"\x89PNG")


def test_several_pictures_are_files_of_their_own(tmp_path: Path) -> None:
    out = tmp_path / "new" / "circle.png"
    with serving(build(FakeStudio(), tmp_path)) as url:
        args = ("--n", "3", "--seed", "5", "--steps", "2", "--out", str(out), "--url", f"{url}/v1")
        result = troupe("generate", "a red circle", *args)
        assert result.exit_code == 0, result.output
    assert "step 6 of 6" in result.output
    files = [out.with_name(f"circle-{number}.png") for number in (1, 2, 3)]
    assert sorted(out.parent.iterdir()) == files
    seeds = [int(seed) for seed in re.findall(r"circle-\d\.png  seed (\d+)", result.output)]
    assert len(set(seeds)) == 3
    for file, seed in zip(files, seeds, strict=True):
        assert np.abs(pixels_of(file.read_bytes())[0, 0].astype(int) - colour(seed)).max() == 0


def test_several_clips_are_refused(tmp_path: Path) -> None:
    with serving(build(FakeStudio(), tmp_path)) as url:
        args = ("--model", "fake-clips", "--n", "2", "--out", "a.mp4", "--url", url)
        assert_one_line(troupe("generate", "a red circle", *args), "--n is for pictures")


@pytest.mark.parametrize(
    "url", ["http://there:80", "http://there:80/", "http://there:80/v1", "http://there:80/v1/"], ids=str
)
def test_a_url_may_end_as_other_clients_want_it(url: str) -> None:
    assert root_of(url) == "http://there:80"


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
