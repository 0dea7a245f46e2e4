"""The command line's own client handles a server's answers."""

from __future__ import annotations

import re
import time
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Self

import httpx
import numpy as np
import pytest

from deployments.cli import client
from deployments.cli.client import Client, RefusedError, Result, root_of
from deployments.service.interface import Progress
from engines.gang.errors import GangBrokenError
from pipelines.request import InputPicture, Lora, MediaRequest
from tests.deployments.http.conftest import build, serving
from tests.deployments.http.routes.test_video_inputs import FILE as CLIP
from tests.deployments.support.commands import assert_one_line, troupe
from tests.deployments.support.fake_service import CHANGED_CLIPS, FakeService, colour
from tests.deployments.support.files import file_of, noise
from tests.deployments.support.live import pixels_of


def test_a_picture_is_streamed(tmp_path: Path) -> None:
    with serving(build(FakeService(), tmp_path)) as url, Client(url) as client:
        *steps, result = client.picture({"prompt": "a", "seed": 5, "num_inference_steps": 3})
    assert [step.step for step in steps if isinstance(step, Progress)] == [1, 2, 3]
    assert isinstance(result, Result)
    assert (result.seed, result.data[:4]) == (5, b"\x89PNG")


def test_several_pictures_are_files_of_their_own(tmp_path: Path) -> None:
    out = tmp_path / "new" / "circle.png"
    with serving(build(FakeService(), tmp_path)) as url:
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


def test_words_are_printed_as_they_are(tmp_path: Path) -> None:
    """A terminal's library gives brackets and colons a meaning, and wraps lines."""
    prompt, out = f"a sign: [/open] [red] :cat:{20 * ' and a dog'}", tmp_path / "a[final].png"
    with serving(build(FakeService(), tmp_path)) as url:
        result = troupe("generate", prompt, "--steps", "2", "--out", str(out), "--url", url)
    assert result.exit_code == 0, result.output
    assert f"fake-pictures: {prompt}" in result.output
    assert f"{out}  seed" in result.output


def test_several_clips_are_refused(tmp_path: Path) -> None:
    with serving(build(FakeService(), tmp_path)) as url:
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

    service = FakeService(before=fail, at_step=fail)
    with (
        serving(build(service, tmp_path)) as url,
        Client(url) as client,
        pytest.raises(RefusedError, match="rank 0 died"),
    ):
        list(client.picture({"prompt": "a"}))


def test_pictures_are_sent_as_files(tmp_path: Path) -> None:
    service, out = FakeService(takes_pictures=True), tmp_path / "out.png"
    first, second = noise(48, 32, seed=1), noise(32, 48, seed=2)
    for name, image in (("a.png", first), ("b", second), ("mask.png", first.convert("RGBA"))):
        (tmp_path / name).write_bytes(file_of(image))
    with serving(build(service, tmp_path)) as url:
        first_file, second_file, mask_file = (str(tmp_path / name) for name in ("a.png", "b", "mask.png"))
        files = ("--image", first_file, "--image", second_file, "--mask", mask_file)
        args = ("--strength", "0.5", "--seed", "5", "--n", "2", "--out", str(out), "--url", url)
        result = troupe("generate", "ein grüner Kreis", *files, *args)
        assert result.exit_code == 0, result.output
        assert "fake-edits: ein grüner Kreis" in result.output
    request, inputs = service.performed[0], service.inputs[0]
    assert (request.prompt, request.strength, request.seed) == ("ein grüner Kreis", 0.5, 5)
    assert inputs.pictures == (InputPicture.of(first), InputPicture.of(second))
    assert inputs.mask is not None
    assert pixels_of(out.with_name("out-1.png").read_bytes()).shape == (32, 48, 3)


@pytest.mark.parametrize("with_picture", [False, True], ids=["json", "form"])
def test_adapters_are_sent(tmp_path: Path, with_picture: bool) -> None:
    model = "fake-edits" if with_picture else "fake-pictures"
    service = FakeService(takes_pictures=True, loras={model: (Lora(name="ink"), Lora(name="oil", scale=0.3))})
    (tmp_path / "a.png").write_bytes(file_of(noise(48, 32)))
    with serving(build(service, tmp_path)) as url:
        args = ("--model", f"{model}:oil", "--lora", "ink:0.5", "--out", str(tmp_path / "b.png"), "--url", url)
        picture = ("--image", str(tmp_path / "a.png")) if with_picture else ()
        result = troupe("generate", "a red circle", *args, *picture)
        assert result.exit_code == 0, result.output
    assert service.performed[0].loras == (Lora(name="ink", scale=0.5), Lora(name="oil", scale=0.3))


def test_a_mask_that_is_needed_or_of_no_use_is_told_before_anything_is_sent(tmp_path: Path) -> None:
    service, file = FakeService(only_inpaints=True), str(tmp_path / "a.png")
    Path(file).write_bytes(file_of(noise(48, 32)))
    with serving(build(service, tmp_path)) as url:
        for model, args, told in (
            ("fake-inpaints", (), "paints what a mask marks in a picture: add --image FILE --mask FILE"),
            ("fake-inpaints", ("--image", file), "paints what a mask marks in a picture: add --mask FILE"),
            ("fake-inpaints", ("--mask", file), "paints what a mask marks in a picture: add --image FILE"),
            ("fake-pictures", ("--mask", file), "--mask says where to paint in a picture: add --image FILE"),
            ("fake-pictures", ("--image", file, "--mask", file), "fake-pictures takes no mask: leave --mask out"),
        ):
            out = ("--model", model, "--out", str(tmp_path / "b.png"), "--url", url)
            assert_one_line(troupe("generate", "a", *args, *out), told)
        whole = ("--image", file, "--mask", file, "--out", str(tmp_path / "b.png"), "--url", url)
        assert troupe("generate", "a", *whole).exit_code == 0
    assert [request.model for request in service.performed] == ["fake-inpaints"]


def test_a_clip_begins_with_a_picture(tmp_path: Path) -> None:
    service, picture = FakeService(takes_pictures=True), noise(48, 32)
    (tmp_path / "a.png").write_bytes(file_of(picture))
    with serving(build(service, tmp_path)) as url:
        args = ("--model", "fake-begun-clips", "--image", str(tmp_path / "a.png"), "--out", str(tmp_path / "a.mp4"))
        assert troupe("generate", "a red circle", *args, "--url", url).exit_code == 0
        for option, told in (
            ("--mask", "clips without a mask"),
            ("--control-image", "--control-image is for pictures"),
        ):
            assert_one_line(troupe("generate", "a", *args, option, args[3], "--url", url), told)
    assert [inputs.pictures for inputs in service.inputs] == [(InputPicture.of(picture),)]


def test_a_mask_of_a_clip_goes_to_the_model_that_takes_it(tmp_path: Path) -> None:
    service = FakeService(takes_clips=True, defaults={"masked": replace(CHANGED_CLIPS, masks_video=True)})
    file = tmp_path / "a.mp4"
    file.write_bytes(CLIP)
    with serving(build(service, tmp_path)) as url:
        args = ("--mask", str(file), "--out", str(tmp_path / "b.mp4"), "--url", url)
        result = troupe("generate", "a", "--video", str(file), *args)
        assert result.exit_code == 0, result.output
        told = "--mask says where a clip is made anew: add --video FILE"
        assert_one_line(troupe("generate", "a", "--model", "masked", *args), told)
    (request,), (inputs,) = service.performed, service.inputs
    assert (request.model, request.has_mask) == ("masked", True)
    assert inputs.video_mask == inputs.video


def test_clips_and_controls_go_to_the_models_that_take_them(tmp_path: Path) -> None:
    service, control = FakeService(takes_clips=True, takes_control=True), noise(48, 32)
    (tmp_path / "a.mp4").write_bytes(CLIP)
    (tmp_path / "a.png").write_bytes(file_of(control))
    with serving(build(service, tmp_path)) as url:
        for option, name in (("--video", "a.mp4"), ("--control-image", "a.png")):
            out = str(tmp_path / f"out-{name}")
            result = troupe("generate", "a", option, str(tmp_path / name), "--out", out, "--url", url)
            assert result.exit_code == 0, result.output
        clip = ("--video", str(tmp_path / "a.mp4"), "--out", str(tmp_path / "b.png"), "--url", url)
        assert_one_line(troupe("generate", "a", *clip), "b.png is a picture: --video is for clips")
    assert [request.model for request in service.performed] == ["fake-changed-clips", "fake-controlled"]
    changed, controlled = service.inputs
    assert changed.video is not None
    assert changed.video.num_frames == service.performed[0].num_video_frames == 9
    assert controlled.control == InputPicture.of(control)


VIDEO = {"id": "video_1", "num_inference_steps": 4, "progress": 0, "eta_s": None, "seed": 5}
QUEUED, HALF, DONE = (
    VIDEO | {"status": status, "progress": progress}
    for status, progress in (("queued", 0), ("in_progress", 50), ("completed", 100))
)


class Away(Client):
    """A client of a fake server. It answers ``POST`` with a waiting clip and each ``GET`` with the next of ``answers``,
    or breaks the connection."""

    def __init__(self, *answers: httpx.Response | None) -> None:
        super().__init__("http://troupe")
        self.answers, self.asked = list(answers), list[str]()
        self._http = httpx.Client(base_url="http://troupe", transport=httpx.MockTransport(self.answer))

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(f"{request.method} {request.url.path}")
        if request.method != "GET":
            return httpx.Response(200, json=QUEUED)
        if (answer := self.answers.pop(0)) is None:
            raise httpx.ReadError("reset by peer", request=request)
        return answer


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "POLL_S", 0.0)


@pytest.mark.usefixtures("at_once")
def test_a_server_that_is_away_meanwhile_is_waited_for() -> None:
    """The client waits while the clip is made, and when it fetches the file."""
    away = [httpx.Response(status, json={}) for status in (502, 503, 504)]
    answers = (httpx.Response(200, json=HALF), *away, None, httpx.Response(200, json=DONE))
    with Away(*answers, None, httpx.Response(502), httpx.Response(200, content=b"mp4")) as away_client:
        *steps, result = away_client.clip({"prompt": "a"})
        assert [step.step for step in steps if isinstance(step, Progress)] == [2, 4]
        assert isinstance(result, Result)
        assert result.data == b"mp4"
        assert not [asked for asked in away_client.asked if asked.startswith("DELETE")]


@pytest.mark.usefixtures("at_once")
def test_the_time_left_is_that_of_the_steps_whatever_the_clip_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for 90 s, and has done half of its steps 10 s later."""
    times_s = iter([0.0, 0.0, 90.0, 90.0, 100.0, 100.0, 100.0])
    clock = SimpleNamespace(monotonic=times_s.__next__, sleep=time.sleep)  # its own: other threads read the real one
    monkeypatch.setattr(client, "time", clock)
    queued, half = (httpx.Response(200, json=clip) for clip in (QUEUED, HALF))
    with Away(queued, half) as away_client:
        progress = next(away_client.clip({"prompt": "a"}))
        assert isinstance(progress, Progress)
        assert progress.eta_s == 10.0
        away_client.answers.append(httpx.Response(200, json=DONE))


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(
    ("answer", "reason"), [(httpx.Response(502), "502 Bad Gateway"), (None, "reset by peer")], ids=["door", "nobody"]
)
def test_a_server_that_stays_away_keeps_the_clip(
    monkeypatch: pytest.MonkeyPatch, answer: httpx.Response | None, reason: str
) -> None:
    monkeypatch.setattr(client, "AWAY_S", 0.0)
    message = rf"no answer from http://troupe for 0 s \({reason}\).*troupe clips --url http://troupe --download video_1"
    with Away(answer) as away_client:
        with pytest.raises(RuntimeError, match=message):
            list(away_client.clip({"prompt": "a"}))
        assert away_client.asked == ["POST /v1/videos", "GET /v1/videos/video_1"]


@pytest.mark.parametrize(
    "answer",
    [httpx.Response(200, json={"data": [{"id": "a", "object": "model"}]}), httpx.Response(200, text="<html>")],
    ids=["of other models", "of pages"],
)
def test_another_server_is_named_as_such(answer: httpx.Response) -> None:
    with Away(answer) as other, pytest.raises(RefusedError, match="http://troupe/v1/models is no Troupe server"):
        other.models()


@pytest.mark.usefixtures("at_once")
def test_who_leaves_deletes_the_clip() -> None:
    with Away(httpx.Response(200, json=HALF)) as away_client:
        events = away_client.clip({"prompt": "a"})
        assert isinstance(events, Generator)
        next(events)
        events.close()
        assert away_client.asked[-1] == "DELETE /v1/videos/video_1"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--image", "nowhere.png"), "nowhere.png: No such file or directory"),
        (("--lora", "ink:much"), "--lora ink:much: 'much' is no number; write NAME:SCALE"),
        (("--lora", "ink"), "its adapters: none"),
        (("--strength", "0.5"), "--strength is for input pictures: add --image FILE"),
        (("--model", "fake-pictures", "--image", __file__), "this model takes none"),
    ],
    ids=["no file", "no number", "no adapter", "no picture", "words alone"],
)
def test_what_cannot_go_along_is_told(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    with serving(build(FakeService(takes_pictures=True), tmp_path)) as url:
        result = troupe("generate", "a red circle", *options, "--out", str(tmp_path / "a.png"), "--url", url)
    assert_one_line(result, message)
