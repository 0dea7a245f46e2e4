"""Clips under kills, with a service without models: the drawn load, the ends of visits, and lost clips."""

from __future__ import annotations

import random
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import psutil
import pytest

from benchmarks.faults import kills
from benchmarks.faults.clients import STORM_SIZE, Clients, End, Outcome, Visit, drawn_turns, refusal
from benchmarks.faults.kills import Killer
from benchmarks.faults.storm import draw_references, ride_out, summary, was_cut_by_kill
from tests.deployments.http.conftest import build, serving
from tests.deployments.support.fake_service import FakeService
from tests.support.patience import PATIENCE_S

ALIASES: dict[str, tuple[str, ...]] = {
    "fake-pictures": ("flux-shapes",),
    "fake-clips": ("wan-shapes",),
    "fake-edits": ("kontext-shapes",),
}


@pytest.fixture
def service() -> FakeService:
    return FakeService(step_s=0.001, takes_pictures=True, aliases=ALIASES)


@pytest.fixture
async def clients(service: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Clients]:
    monkeypatch.setattr("benchmarks.faults.clients.POLL_S", 0.02)
    with serving(build(service, tmp_path)) as url:
        async with httpx.AsyncClient(base_url=url, timeout=None) as http:
            clients = Clients(http=http, keys=("",), hang_s=PATIENCE_S)
            await draw_references(clients)
            yield clients


def test_turns_are_those_that_were_asked_for() -> None:
    turns = drawn_turns(2000, "deadline", 3, seed=1)
    visits = [visit for turn in turns for visit in turn]
    assert len(visits) == 2000
    assert turns == drawn_turns(2000, "deadline", 3, seed=1) != drawn_turns(2000, "deadline", 3, seed=2)
    assert {len(turn) for turn in turns} >= {1, STORM_SIZE}
    assert all(
        visit.stays_s is not None or visit.leaves_at for turn in turns if len(turn) == STORM_SIZE for visit in turn
    )
    assert {visit.kind for visit in visits} == {"picture", "stream", "edit", "clip", "sync"}
    assert {visit.key for visit in visits} == {0, 1, 2}
    assert all(visit.deadline_s is None for turn in drawn_turns(300, "fair", 1, seed=1) for visit in turn)


async def test_nothing_is_lost_where_nothing_breaks(clients: Clients) -> None:
    outcomes = await ride_out(clients, drawn_turns(60, "shortest", 1, seed=3), 12, lambda line: None)
    found = summary(outcomes, ())
    assert found["lost"] == []
    assert found["requests"] == 60
    assert set(found["ends"]) <= {"right", "left", "refused"}
    assert found["ends"]["right"] > 30
    assert not clients.clips, "every clip was followed to its end"


async def test_what_breaks_is_lost(clients: Clients, service: FakeService) -> None:
    clients.references["/v1/images/generations", 0] = b"other bytes"

    def fail(request: object) -> None:
        raise RuntimeError("a defect")

    turns = [turn for turn in drawn_turns(40, "shortest", 1, seed=3) if len(turn) == 1 and turn[0].stays_s is None]
    outcomes = await ride_out(clients, [turn for turn in turns if turn[0].leaves_at is None], 4, lambda line: None)
    assert {one.end for one in outcomes if one.kind in ("picture", "stream")} == {"right", "wrong_bytes"}
    service.before = fail
    pictures = [turn for turn in turns if turn[0].kind == "picture"]
    outcomes = await ride_out(clients, pictures, 4, lambda line: None)
    assert Counter(one.end for one in outcomes) == {"no_reason": len(pictures)}
    assert len(summary(outcomes, ())["lost"]) == len(pictures) > 0


def test_a_cut_is_excused_by_what_carried_the_connection_alone() -> None:
    cut = Outcome(kind="stream", end="cut", began_s=100.0, ended_s=110.0)
    for struck, is_excused in (
        ([(105.0, "ingress")], True),
        ([(80.0, "proxy")], True),
        ([(105.0, "rank"), (111.0, "ingress"), (10.0, "ingress")], False),
    ):
        assert was_cut_by_kill(cut, struck) is is_excused
        assert bool(summary([cut], struck)["lost"]) is not is_excused


ERROR = {"message": "m", "type": "t", "param": None, "code": "server_lost"}
LATE = {**ERROR, "code": "deadline"}


@pytest.mark.parametrize(
    ("answer", "deadline_s", "expected"),
    [
        (httpx.Response(503, json={"error": ERROR}), None, "refused"),
        (httpx.Response(200, json={"error": ERROR}), None, "no_reason"),
        (httpx.Response(500, text="Internal Server Error"), None, "no_reason"),
        (httpx.Response(404, json={"detail": "Not Found"}), None, "no_reason"),
        (httpx.Response(503, json={"error": {"message": "m"}}), None, "no_reason"),
        (httpx.Response(400, json={"error": LATE}), 20.0, "refused"),
        (httpx.Response(400, json={"error": LATE}), None, "no_reason"),
    ],
)
def test_a_refusal_has_the_shape_of_an_error_and_a_reason(
    answer: httpx.Response, deadline_s: float | None, expected: End
) -> None:
    assert refusal(Visit(kind="picture", number=0, key=0, deadline_s=deadline_s), answer).end == expected


async def test_a_visit_without_an_answer_hangs(clients: Clients) -> None:
    clients.hang_s = 0.0
    outcome = await clients.visit(Visit(kind="picture", number=0, key=0))
    assert outcome.end == "hung"
    assert summary([outcome], ())["lost"]


@pytest.mark.parametrize(("code", "expected"), [("gang_broken", "refused"), ("server_lost", "no_reason")])
async def test_an_accepted_clip_may_not_be_lost(code: str, expected: End) -> None:
    """Its request was answered, so a server that dies must make it again."""
    failed = {"id": "c", "status": "failed", "error": {**ERROR, "code": code}}
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=failed))
    async with httpx.AsyncClient(base_url="http://server", transport=transport, trust_env=False) as http:
        outcome = await Clients(http=http, keys=("",), hang_s=60.0).visit(Visit(kind="clip", number=0, key=0))
    assert outcome.end == expected


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
