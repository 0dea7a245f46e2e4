"""A ``troupe serve`` that was killed in the middle of a clip and started again: it finishes the clip, other commands
talk to it, and Ctrl-C ends it."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import av
import httpx
import psutil
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from deployments.cli.main import app
from tests.deployments.commands import SERVING, Command, command, config_file, short_folder
from tests.deployments.live import PROMPT, TIMEOUT_S, config_of, wait_until

KEY = "a-secret"
CLIP = {"model": "clips", "prompt": PROMPT, "seed": 3, "num_inference_steps": 60}


@dataclass(frozen=True, kw_only=True, slots=True)
class Restarted:
    """The second ``troupe serve``, and the clip that its killed predecessor had begun."""

    url: str
    clip_id: str

    def client(self) -> httpx.Client:
        return client_of(self.url)


def client_of(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=TIMEOUT_S, headers={"Authorization": f"Bearer {KEY}"})


@pytest.fixture(scope="module")
def restarted(pictures: Path, clips: Path) -> Iterator[Restarted]:
    with short_folder() as folder:
        env = {"TROUPE_API_KEYS": KEY}
        clips_alone = config_file(config_of({"clips": clips}, num_ranks=1), folder)
        with command("serve", clips_alone, folder=folder, env=env) as first:
            clip_id = begin_clip(first)
            first.kill_all()
        both = config_file(config_of({"pictures": pictures, "clips": clips}, num_ranks=1), folder)
        with command("serve", both, folder=folder, env=env) as second:
            yield Restarted(url=second.wait_for(SERVING), clip_id=clip_id)
            assert second.interrupt() == 130


def begin_clip(serve: Command) -> str:
    """The id of a clip that is under way."""
    with client_of(serve.wait_for(SERVING)) as http:
        clip_id = str(http.post("/v1/videos", json=CLIP).raise_for_status().json()["id"])
        wait_until(lambda: int(str(status(http, clip_id)["progress"])) >= 20, "some progress", TIMEOUT_S)
    return clip_id


def status(http: httpx.Client, clip_id: str) -> dict[str, object]:
    return dict(http.get(f"/v1/videos/{clip_id}").raise_for_status().json())


def finish(http: httpx.Client, clip_id: str) -> bytes:
    wait_until(lambda: status(http, clip_id)["status"] in ("completed", "failed"), "the clip", TIMEOUT_S)
    assert status(http, clip_id)["status"] == "completed", status(http, clip_id)
    return http.get(f"/v1/videos/{clip_id}/content").raise_for_status().content


@pytest.fixture(scope="module")
def url(restarted: Restarted) -> str:
    return restarted.url


def test_a_clip_outlives_the_application(restarted: Restarted):
    with restarted.client() as http:
        undisturbed = str(http.post("/v1/videos", json=CLIP).raise_for_status().json()["id"])
        assert undisturbed != restarted.clip_id
        assert finish(http, restarted.clip_id) == finish(http, undisturbed)


def troupe(*args: str) -> Result:
    return CliRunner().invoke(app, args, env={"COLUMNS": "200", "TERM": "dumb"})


def test_a_picture(url: str, tmp_path: Path):
    made = []
    for name in ("one.png", "deeper/same.png"):
        out = tmp_path / name
        size = ("--size", "64x48", "--steps", "4", "--seed", "7")
        result = troupe("generate", "a red circle", *size, "--out", str(out), "--url", url, "--api-key", KEY)
        assert result.exit_code == 0, result.output
        assert f"{out}  seed 7" in result.output
        assert "step 4 of 4" in result.output
        for stage in ("queue", "encode", "denoise", "decode"):
            assert stage in result.output
        made.append(out.read_bytes())
    assert made[0] == made[1]
    picture = Image.open(io.BytesIO(made[0]))
    assert (picture.format, picture.size) == ("PNG", (64, 48))


def test_a_clip(url: str, tmp_path: Path):
    out = tmp_path / "clip.mp4"
    wanted = ("--model", "clips", "--steps", "3", "--seed", "7", "--out", str(out))
    result = troupe("generate", "a red circle", *wanted, "--url", url, "--api-key", KEY)
    assert result.exit_code == 0, result.output
    assert f"{out}  seed 7" in result.output
    with av.open(str(out)) as container:
        assert container.streams.video[0].codec_context.name == "h264"
        assert sum(1 for _ in container.decode(video=0)) == 9


def test_models(url: str):
    result = troupe("models", "--url", url, "--api-key", KEY)
    assert result.exit_code == 0, result.output
    for cell in ("pictures", "clips", "image", "video", "64x64", "32x32"):
        assert cell in result.output


MISTAKES = {
    "no key": (["--out", "a.png"], "key"),
    "size": (
        ["--size", "63x64", "--out", "a.png", "--api-key", KEY],
        "size is 63x64: width and height must be multiples",
    ),
    "steps": (["--steps", "0", "--out", "a.png", "--api-key", KEY], "num_inference_steps is 0"),
    "model": (["--model", "dall-e", "--out", "a.png", "--api-key", KEY], "no model dall-e; served: pictures, clips"),
    "ending": (
        ["--out", "a.mp4", "--api-key", KEY],
        "pictures makes pictures: --out must end in .png, .jpg, .jpeg, .webp",
    ),
    "clip": (["--model", "clips", "--out", "a.png", "--api-key", KEY], "clips makes clips: --out must end in .mp4"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(url: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    args, told = MISTAKES[name]
    result = troupe("generate", "a red circle", *args, "--url", url)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("troupe: ")
    assert told in line
    assert not list(tmp_path.iterdir())


def test_it_listens_on_this_machine_alone(url: str):
    assert httpx.get(f"{url}/health").status_code == 200
    port = httpx.URL(url).port
    listening = [one.laddr for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    assert {address.ip for address in listening if address.port == port} == {"127.0.0.1"}
