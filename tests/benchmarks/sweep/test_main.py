"""A sweep resumes where it stopped, and reports each model's results or its error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from benchmarks.application.client import STAGES, Client
from benchmarks.sweep import __main__ as program
from benchmarks.sweep import cards, lone, whole
from benchmarks.sweep.loop import SweepRequest
from deployments.config import ServeConfig
from pipelines.checkpoint import Checkpoint
from pipelines.size import Size
from tests.deployments.support.live import live
from tests.pipelines.support.checkpoints import tiny, tiny_qwen

MODELS = ["FLUX.1-dev", "LTX-2", "Z-Image"]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the measured models; LTX-2 fails."""
    names: list[str] = []

    def measure(name: str, ranks: int, arguments: Any) -> dict[str, Any]:
        names.append(f"{name} on {ranks}")
        if name == "LTX-2":
            raise RuntimeError("out of memory")
        return {"step_ms": 2.5}

    monkeypatch.setattr(program, "measured", measure)
    return names


def sweep(out: Path, *words: str) -> int:
    with pytest.raises(SystemExit) as end:
        program.main([*MODELS, "--out", str(out), *words])
    return int(end.value.code or 0)


def lines_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines() if line.endswith("}")]


def test_each_model_is_a_line_and_is_not_done_again(tmp_path: Path, measured: list[str]) -> None:
    out = tmp_path / "results" / "sweep.jsonl"
    assert sweep(out) == 0
    assert measured == [f"{name} on 1" for name in MODELS]
    assert [(line["model"], line.get("step_ms"), line.get("error")) for line in lines_of(out)] == [
        ("FLUX.1-dev", 2.5, None),
        ("LTX-2", None, "RuntimeError: out of memory"),
        ("Z-Image", 2.5, None),
    ]
    assert sweep(out, "--ranks", "1", "2") == 0
    assert measured[3:] == [f"{name} on 2" for name in MODELS], "results on one rank exist"
    assert sweep(out, "--ranks", "1", "--again") == 1, "a second failure measured nothing"
    assert measured[6:] == ["LTX-2 on 1"]


def test_what_measured_nothing_does_not_end_with_0(tmp_path: Path, measured: list[str]) -> None:
    out = tmp_path / "sweep.jsonl"
    assert sweep(out, "--limit-s", "-1") == 1
    assert (measured, out.exists()) == ([], False)
    assert sweep(out) == 0
    assert sweep(out) == 1, "nothing is left"
    assert len(measured) == 3


def test_a_line_that_the_program_was_killed_in_is_done_again(tmp_path: Path, measured: list[str]) -> None:
    out = tmp_path / "sweep.jsonl"
    assert sweep(out) == 0
    *others, last = out.read_text().splitlines()
    out.write_text("\n".join([*others, last[:20]]))
    assert sweep(out) == 0
    assert [line["model"] for line in lines_of(out)] == MODELS
    assert measured[3:] == ["Z-Image on 1"]


def test_a_model_that_the_disk_has_no_room_for_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=2**30))
    out = tmp_path / "sweep.jsonl"
    with pytest.raises(SystemExit, match="1"):
        program.main(["FLUX.1-dev", "--out", str(out), "--scratch", str(tmp_path)])
    (line,) = lines_of(out)
    assert "FLUX.1-dev takes 36 GiB on the disk, 1 are free" in line["error"]


@pytest.mark.parametrize(
    ("name", "paths"),
    [
        ("FLUX.2-klein-4B", ["generations", "generations", "generations", "edits"]),
        ("FLUX.1-Kontext-dev", ["generations", "generations", "generations", "edits"]),
        ("Qwen-Image-Edit-2511", ["edits"] * 3),
        ("Wan2.1-T2V-1.3B", ["sync"] * 3),
        ("Wan2.1-FLF2V-14B-720P", ["sync"] * 3),
    ],
)
def test_a_model_is_asked_for_what_it_makes(name: str, paths: list[str]) -> None:
    sent: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        times = ", ".join(f"{stage};dur={number}" for number, stage in enumerate(STAGES))
        media: dict[str, Any] = {"content": b"mp4", "headers": {"content-type": "video/mp4"}}
        picture: dict[str, Any] = {"json": {"data": [{"b64_json": "AAAA"}]}, "headers": {}}
        found = media if "videos" in request.url.path else picture
        return httpx.Response(200, **{**found, "headers": {**found["headers"], "server-timing": times}})

    defaults = Checkpoint.of_configuration(name).defaults
    with Client("http://swept") as client:
        client._transport = httpx.MockTransport(answer)
        found = whole.answers_of(client, defaults, SweepRequest(size=Size(width=64, height=64, num_frames=5)))
    assert [request.url.path.split("/")[-1] for request in sent] == paths
    assert next(request.read().count(b"image/png") for request in sent) == defaults.min_pictures
    assert found["same_bytes"]
    assert found["step_ms"] == round(STAGES.index("denoise") / found["steps"], 1)
    assert ("with_picture_ms" in found) == (len(paths) == 4)


@pytest.mark.parametrize(("name", "frames"), [("Wan2.1-T2V-1.3B", 37), ("LTX-Video", 33), ("FLUX.2-klein-4B", None)])
def test_clips_are_as_long_as_a_model_makes_them_up_to_a_limit(name: str, frames: int | None) -> None:
    defaults = Checkpoint.of_configuration(name).defaults
    size = SweepRequest(max_frames=38).size_of(defaults)
    assert size == Size(width=defaults.width, height=defaults.height, num_frames=frames)
    assert defaults.request(size).num_frames == (frames or 1)


def test_memory_is_of_the_own_processes_by_gpu() -> None:
    said = "GPU-a, 11, 100\\nGPU-b, 11, 50\\nGPU-a, 12, 30\\nGPU-a, 99, 5000\\nGPU-b, 12, [N/A]\\n"
    assert whole.held_mib_by_gpu({11, 12}, ("printf", said)) == {"GPU-a": 130, "GPU-b": 50}
    assert whole.held_mib_by_gpu({11}, ("no-such-program",)) == {}


@pytest.mark.slow
def test_a_tiny_model_goes_through_the_whole_application(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def serving(config: ServeConfig) -> Iterator[Any]:
        with live(config) as url:
            yield SimpleNamespace(url=url, ready_s=1.0, logs=tmp_path, processes=list)

    monkeypatch.setattr(whole, "serving", serving)
    folder, out = tiny.flux(tmp_path / "flux"), tmp_path / "sweep.jsonl"
    with pytest.raises(SystemExit) as end:
        program.main([str(folder), "--ranks", "2", "--size", "64x32", "--steps", "3", "--out", str(out)])
    (line,) = lines_of(out)
    assert (end.value.code, line["model"], line["ranks"]) == (0, str(folder), 2)
    assert (line["through"], line["size"], line["steps"]) == ("application", "64x32", 3)
    assert (line["same_bytes"], line["captured"]) == (True, False)
    assert 0 < 3 * line["step_ms"] < line["again_ms"]["total"] + 1


@pytest.mark.slow
def test_a_tiny_model_goes_through_the_whole_application_as_on_a_small_card(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def serving(config: ServeConfig, ready_within_s: float, keep_logs_in: Path | None) -> Iterator[Any]:
        document = config.model_dump(mode="json")
        document["http_options"]["port"] = 0
        with live(ServeConfig.model_validate(document)) as url:
            yield SimpleNamespace(url=url, ready_s=1.0, logs=tmp_path)

    monkeypatch.setattr(cards, "serving", serving)
    folder, out = tiny.flux(tmp_path / "flux"), tmp_path / "cards.jsonl"
    with pytest.raises(SystemExit) as end:
        cards.main([str(folder), "--memory", "12", "--size", "64x32", "--out", str(out)])
    (line,) = lines_of(out)
    assert (end.value.code, line["model"], line["card_gb"], line["hardware"]) == (0, str(folder), 12, "CPU")
    assert (line["savings"], line["size"], line["steps"], line["same_bytes"]) == ({}, "64x32", 4, True)
    assert line["other_ms"]["encode"] > line["again_ms"]["encode"], "another prompt is not in the cache"
    assert "left_gib" not in line, "nothing is held on a CPU"


@pytest.mark.parametrize("num_steps", [2])
def test_a_tiny_model_goes_without_its_encoders(num_steps: int, tmp_path: Path) -> None:
    folder, settings = tiny_qwen.qwen(tmp_path), SweepRequest(size=Size(width=96, height=96), num_steps=num_steps)
    found = lone.measured(str(folder), settings, torch.device("cpu"), torch.float32, nullcontext())
    assert (found["steps"], found["same_bytes"], found["captured"]) == (num_steps, True, False)
    assert found["step_ms"] > 0
    assert found["decode_ms"] > 0
