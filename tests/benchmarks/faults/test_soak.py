"""The soak's clients against a studio without models: what is drawn, how each visit ends, and what counts as lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from benchmarks.faults.soak.clients import Clients, Outcome
from benchmarks.faults.soak.storm import draw_references, ride_out, summary, was_cut_by_kill
from benchmarks.faults.soak.visits import STORM_SIZE, drawn_turns
from tests.deployments.http.conftest import build, serving
from tests.deployments.support.fake_studio import FakeStudio
from tests.support.patience import PATIENCE_S

ALIASES: dict[str, tuple[str, ...]] = {
    "fake-pictures": ("flux-shapes",),
    "fake-clips": ("wan-shapes",),
    "fake-edits": ("kontext-shapes",),
}


@pytest.fixture
def studio() -> FakeStudio:
    return FakeStudio(step_s=0.001, takes_pictures=True, aliases=ALIASES)


@pytest.fixture
async def clients(studio: FakeStudio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Clients]:
    monkeypatch.setattr("benchmarks.faults.soak.clients.POLL_S", 0.02)
    with serving(build(studio, tmp_path)) as url:
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


async def test_what_breaks_is_lost(clients: Clients, studio: FakeStudio) -> None:
    clients.references["/v1/images/generations", 0] = b"other bytes"

    def fail(request: object) -> None:
        raise RuntimeError("a defect")

    turns = [turn for turn in drawn_turns(40, "shortest", 1, seed=3) if len(turn) == 1 and turn[0].stays_s is None]
    outcomes = await ride_out(clients, [turn for turn in turns if turn[0].leaves_at is None], 4, lambda line: None)
    assert {one.end for one in outcomes if one.kind in ("picture", "stream")} == {"right", "wrong_bytes"}
    studio.before = fail
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
