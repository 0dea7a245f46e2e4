"""Each fault strikes during a picture, clients retry until they have theirs, and a missing one is a failure."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest

from benchmarks.faults import insistent, kills, matrix
from benchmarks.faults.insistent import Answer, Health, InsistentClient
from benchmarks.faults.kills import Fault
from tests.benchmarks.faults.test_timeline import FAULT_S, RECORDS

PICTURE = {"data": [{"b64_json": "AAAA"}]}


class TwoFaults:
    """Two faults at a simulated application; after the second, a later picture has other bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.struck: list[str] = []
        monkeypatch.setattr(matrix, "serving", self._serving)
        monkeypatch.setattr(matrix, "processes_of", lambda _: {"rank": []})
        monkeypatch.setattr(matrix, "faults", lambda *_: map(self._fault, ("one", "two")))
        monkeypatch.setattr(InsistentClient, "picture", self._picture)
        monkeypatch.setattr(Health, "watched", self._watched)
        for name in ("LATER_S", "SETTLED_S"):
            monkeypatch.setattr(matrix, name, 0.0)

    @contextmanager
    def _serving(self, _: object) -> Iterator[Any]:
        yield SimpleNamespace(url="", process=None, memory=lambda: SimpleNamespace(pss_bytes=2**30))

    @contextmanager
    def _watched(self) -> Iterator[None]:
        yield

    def _fault(self, name: str) -> Fault:
        def strike() -> tuple[psutil.Process]:
            self.struck.append(name)
            child = subprocess.Popen(["true"])
            found = psutil.Process(child.pid)
            child.wait()
            return (found,)

        return Fault(name=name, aim=lambda: strike)

    def _picture(self, num_steps: int, until_s: float, at_step: Callable[[int], None] | None = None) -> Answer:
        if at_step is not None:
            at_step(matrix.STRIKE_AT_STEP)
        is_other = len(self.struck) == 2 and num_steps == matrix.FEW_STEPS
        return Answer(data=b"other" if is_other else b"as usual", ended_s=time.monotonic())


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, dict[str, Any]]:
    monkeypatch.setattr(sys, "argv", ["matrix", "--out", str(folder / "out"), *words])
    monkeypatch.setattr(Health, "__init__", lambda health, url: setattr(health, "looks", [(0.0, 200)]))
    with pytest.raises(SystemExit) as end:
        matrix.main()
    return int(end.value.code or 0), json.loads((folder / "out").read_text())


def test_other_bytes_are_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served = TwoFaults(monkeypatch)
    status, document = run(tmp_path, monkeypatch)
    assert (status, served.struck) == (1, ["one", "two"])
    answers = [[answer["answer"] for answer in row["answers"].values()] for row in document["rows"]]
    assert answers == [["right"] * 3, ["right", "wrong bytes", "wrong bytes"]]
    assert [row["is_well"] for row in document["rows"]] == [True, False]
    assert document["rows"][0]["pss_gib"] == 1.0
    printed = capsys.readouterr().out.splitlines()
    assert json.loads(printed[-1])["rows"] == document["rows"]
    assert sum(line.startswith("| two |") for line in printed[printed.index(matrix.HEAD) :]) == 3


def test_a_lost_gang_has_a_timeline_and_other_faults_have_none(tmp_path: Path) -> None:
    (tmp_path / "worker-1.err").write_text("".join(f"{json.dumps(one)}\n" for one in RECORDS))
    application: Any = SimpleNamespace(logs=tmp_path)
    again = [(3, FAULT_S - 1), (1, FAULT_S + 7.5), (2, FAULT_S + 9.0)]
    parts = matrix.parts_of(application, "m", FAULT_S, again)
    assert parts["gang: load"] == 1.5
    assert parts["until the request's first step is seen again"] == 0.5
    assert (parts["all other steps"], parts["rank: weights"]) == (1.5, 1.0)
    assert matrix.parts_of(application, "m", FAULT_S, [(3, FAULT_S - 1), (4, FAULT_S + 1)]) == {}
    assert matrix.parts_of(application, "another", FAULT_S, again) == {}


def test_faults_without_time_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = TwoFaults(monkeypatch)
    status, document = run(tmp_path, monkeypatch, "--seconds", "0", "--only", "wo")
    assert (status, served.struck, document["left_out"]) == (1, [], ["two"])


def test_a_client_asks_again_until_it_has_its_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    error = {"error": {"message": "m", "type": "t", "param": None, "code": "model_not_ready"}}
    answers: list[httpx.Response | Exception] = [httpx.ConnectError("gone"), httpx.Response(503, json=error)]
    answers.append(httpx.Response(200, json=PICTURE))

    def answer(request: httpx.Request) -> httpx.Response:
        if isinstance(one := answers.pop(0), Exception):
            raise one
        return one

    made = httpx.Client(transport=httpx.MockTransport(answer), base_url="http://server")
    monkeypatch.setattr(insistent, "http_client", lambda *_, **__: made)
    monkeypatch.setattr(insistent, "PAUSE_S", 0.0)
    found = InsistentClient(url="", model="m").picture(4, time.monotonic() + 60)
    assert found.text(b"\0\0\0") == "no answer (ConnectError), then 503 model_not_ready, then right"
    assert found.said.keys() == {"503 model_not_ready"}
    assert found.text(b"\0") == "no answer (ConnectError), then 503 model_not_ready, then wrong bytes"


def test_a_client_gives_up() -> None:
    assert InsistentClient(url="http://server", model="m").picture(4, time.monotonic()).text(b"") == "none"


def test_outages_are_told_from_and_until_a_second_after_the_fault() -> None:
    health = Health(url="", looks=[(9.0, 200), (11.0, 503), (12.0, 0), (13.0, 200), (14.0, 503), (15.0, 503)])
    assert health.outages(10.0) == [(1.0, 3.0), (4.0, 5.0)]


def test_both_ranks_of_a_start_are_struck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only new ranks are struck, as soon as they exist."""
    children = [subprocess.Popen(["sleep", "1000"]) for _ in range(4)]
    old, *new = (psutil.Process(child.pid) for child in children)
    looks = iter(([old], [], new[:1], new[:2], new))
    monkeypatch.setattr(kills, "processes_of", lambda _: {"rank": next(looks)})
    monkeypatch.setattr(kills, "rank_pids", lambda *_: [0, old.pid])
    application: Any = SimpleNamespace(process=None, logs=Path())
    try:
        victims = kills._aim_at_a_start(application, "m", signal.SIGKILL)()()
        assert victims == tuple(new[:2])
        assert [child.wait(60) for child in children[:3]] == [-signal.SIGKILL] * 3
        assert children[3].poll() is None
    finally:
        for child in children:
            child.kill()
            child.wait()
