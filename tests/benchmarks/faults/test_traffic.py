"""What the benchmark of random kills makes of answers."""

from __future__ import annotations

import random
import subprocess
import time

import httpx
import psutil
import pytest

from benchmarks.faults import kills
from benchmarks.faults.kills import Killer
from benchmarks.faults.traffic import Tally, Traffic, judged

GOOD = {"error": {"message": "m", "type": "t", "param": None, "code": "c"}}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (httpx.Response(503, json=GOOD), "error"),
        (httpx.Response(200, json=GOOD), "outside_shape"),
        (httpx.Response(500, text="Internal Server Error"), "outside_shape"),
        (httpx.Response(404, json={"detail": "Not Found"}), "outside_shape"),
        (httpx.Response(503, json={"error": {"message": "m"}}), "outside_shape"),
    ],
)
def test_answers_are_judged_by_their_shape(answer: httpx.Response, expected: str) -> None:
    assert judged(answer)[0] == expected


def test_other_bytes_than_before_are_wrong() -> None:
    traffic = Traffic(url="", tally=Tally(hang_s=60.0), references={("image", 1): b"as before"})
    assert traffic._compared("image", 1, b"as before")[0] == "right"
    assert traffic._compared("image", 1, b"another")[0] == "wrong_bytes"


def test_long_requests_hang_whatever_they_end_with() -> None:
    tally = Tally(hang_s=60.0)
    for took_s in (59.0, 61.0):
        tally.note("picture", "right", took_s)
    assert tally.hangs == ["picture: 61 s"]


def test_the_killer_strikes_children_of_its_server_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kills.KINDS, "rank", "sleep")
    with subprocess.Popen(["sleep", "1000"]) as other:
        with subprocess.Popen(["sh", "-c", "sleep 1000; exit $?"]) as server:
            killer = Killer(server=psutil.Process(server.pid), every_s=1.0, rng=random.Random(1))
            while server.poll() is None:
                killer.strike()
                time.sleep(0.01)
        assert sum(killer.kills.values()) >= 1
        assert server.returncode == 128 + 9, "its child was killed, and it was not"
        assert other.poll() is None
        other.kill()
