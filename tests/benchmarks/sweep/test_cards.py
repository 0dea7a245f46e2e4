"""Each card is one line: its memory and times with less memory, or the reason for none."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from benchmarks.application.client import STAGES, Client
from benchmarks.sweep import cards
from benchmarks.sweep.loop import check_room, disk_bytes, said_of
from deployments.config import ServeConfig
from tests.pipelines.support.checkpoints import tiny

GIB = 2**30
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.flux(tmp_path_factory.mktemp("models") / "flux")


class Machine:
    """A GPU host that records the order of events, and each answer's time limit."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.events: list[str] = []
        self.limits_s: list[float] = []
        self.prompts: list[str] = []
        self.kept_logs: list[Path | None] = []
        self.gib_of_failure = 0.0
        """Applications with less memory fail in their last request."""
        self._left_gib = 0.0

    @contextmanager
    def occupied(self, leave_bytes: int) -> Iterator[dict[str, float]]:
        self._left_gib = leave_bytes / GIB
        self.events.append(f"leave {self._left_gib:.2f}")
        found: dict[str, float] = {}
        try:
            yield found
        finally:
            self.events.append("free")
            found |= {"left_gib": round(self._left_gib, 2), "held_gib": 1.5}

    @contextmanager
    def serving(self, config: ServeConfig, *, ready_within_s: float, keep_logs_in: Path | None) -> Iterator[Any]:
        (model,) = config.app.models
        self.kept_logs.append(keep_logs_in)
        self.events.append(f"serve {model.memory_gib:g}")
        try:
            yield SimpleNamespace(url="http://served", ready_s=1.0, logs=self.logs)
        except RuntimeError as error:
            error.add_note(OUT_OF_MEMORY)
            raise
        finally:
            self.events.append("end")

    def client(self, url: str) -> Client:
        client = Client(url)
        client._transport = httpx.MockTransport(self._answer)
        return client

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.limits_s.append(request.extensions["timeout"]["read"])
        self.prompts.append(json.loads(request.read())["prompt"])
        if self._left_gib < self.gib_of_failure and len(self.prompts) % 3 == 0:
            return httpx.Response(500, text="a rank failed")
        times = ", ".join(f"{stage};dur={number}" for number, stage in enumerate(STAGES))
        picture = base64.b64encode(self.prompts[-1].encode()).decode()
        return httpx.Response(200, json={"data": [{"b64_json": picture}]}, headers={"server-timing": times})


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path / "logs")
    made.logs.mkdir()
    monkeypatch.setattr(cards, "occupied", made.occupied)
    monkeypatch.setattr(cards, "serving", made.serving)
    monkeypatch.setattr(cards, "Client", made.client)
    return made


def measure(out: Path, *words: str | Path) -> int:
    with pytest.raises(SystemExit) as end:
        cards.main([*map(str, words), "--size", "64x32", "--out", str(out)])
    return int(end.value.code or 0)


def lines_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_memory_is_held_from_before_the_start_until_after_the_end(
    machine: Machine, folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "cards.jsonl"
    assert measure(out, folder, "--memory", "12", "24", "4", "--card-limit-s", "1000") == 0
    assert machine.events == [
        *("leave 11.83", "serve 12", "end", "free"),
        *("leave 23.66", "serve 24", "end", "free"),
        *("leave 4.00", "serve 4", "end", "free"),
    ]
    first, *_ = lines_of(out)
    assert (first["model"], first["card_gb"], first["savings"], first["is_lossy"]) == (str(folder), 12, {}, False)
    assert (first["held_gib"], first["ready_s"], first["steps"], first["same_bytes"]) == (1.5, 1.0, 4, True)
    assert first["step_ms"] == round(STAGES.index("denoise") / 4, 1)
    assert machine.prompts[0] == machine.prompts[1] != machine.prompts[2]
    assert all(100 < limit_s <= 1000 for limit_s in machine.limits_s)


def test_it_goes_on_where_it_stopped(machine: Machine, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "cards.jsonl"
    assert measure(out, folder, "--memory", "12", "--limit-s", "-1") == 1
    assert (out.exists(), machine.events) == (False, [])
    machine.gib_of_failure = 15.0
    assert measure(out, folder, "--memory", "12", "16") == 0
    assert measure(out, folder, "--memory", "12", "16") == 1, "nothing is left"
    assert machine.events.count("end") == 2
    assert measure(out, folder, "--memory", "12", "16", "--again") == 1, "a second failure measured nothing"
    assert [(line["card_gb"], "error" in line) for line in lines_of(out)] == [(12, True), (16, False), (12, True)]


def test_a_process_without_memory_is_an_error_beside_what_was_seen(
    machine: Machine, folder: Path, tmp_path: Path
) -> None:
    machine.gib_of_failure = 20.0
    assert measure(tmp_path / "cards.jsonl", folder, "--memory", "12", "--logs", tmp_path / "kept") == 1
    assert machine.kept_logs == [tmp_path / "kept" / f"{folder.name}_12"]
    (line,) = lines_of(tmp_path / "cards.jsonl")
    assert line["error"] == "RuntimeError: no picture or clip, but 500: a rank failed"
    assert line["out_of_memory"] == OUT_OF_MEMORY
    assert (line["held_gib"], line["ready_s"], "again_ms" in line, "other_ms" in line) == (1.5, 1.0, True, False)


def test_an_error_names_no_folder_of_this_machine() -> None:
    error = RuntimeError("troupe serve ended with 2:\nlogs are in /tmp/troupe_bench_1/tr_2 until the next start")
    expected = "RuntimeError: troupe serve ended with 2:\nlogs are in FOLDER until the next start"
    assert said_of(error) == expected


def test_a_model_that_no_savings_make_fit_is_neither_written_nor_served(machine: Machine, tmp_path: Path) -> None:
    assert measure(tmp_path / "cards.jsonl", "FLUX.1-dev", "--memory", "12", "--scratch", tmp_path / "none") == 1
    (line,) = lines_of(tmp_path / "cards.jsonl")
    assert line["error"].startswith("ValueError: memory_gib is 12, of which 10.8 are usable")
    assert machine.events == []


@pytest.mark.parametrize("keeps", [False, True])
def test_a_model_is_written_once(
    keeps: bool, machine: Machine, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []

    def write(name: str, where: Path, *, twins: bool) -> None:
        written.append(where)
        tiny.flux(where)

    monkeypatch.setattr(cards, "write_model", write)
    monkeypatch.setattr(cards, "check_room", lambda *_, **__: None)
    words = ("FLUX.1-dev", "--memory", "141", "192", "--scratch", tmp_path, *(("--keep",) if keeps else ()))
    assert measure(tmp_path / "cards.jsonl", *words) == 0
    assert all(line["predicted_s"] > 0 for line in lines_of(tmp_path / "cards.jsonl"))
    assert written == [tmp_path / "troupe_card_FLUX.1-dev.unfinished"]
    assert (tmp_path / "troupe_card_FLUX.1-dev").is_dir() == keeps
    assert measure(tmp_path / "more.jsonl", *words) == 0
    assert len(written) == (1 if keeps else 2)


@pytest.mark.parametrize(("name", "twins", "gib"), [("FLUX.2-klein-4B", False, 15.0), ("Wan2.2-T2V-A14B", True, 37.5)])
def test_the_disk_must_have_room(
    name: str, twins: bool, gib: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert disk_bytes(name, twins=twins) / GIB == pytest.approx(gib, abs=0.1)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10 * GIB))
    with pytest.raises(ValueError, match=rf"{name} takes \d+ GiB on the disk, 10 are free in"):
        check_room(name, tmp_path, twins=twins)
