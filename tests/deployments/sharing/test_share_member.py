"""Members of a share group with simulated arbiters, and an arbiter that was restarted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray
from ray.exceptions import ActorDiedError, RayTaskError

from deployments.asyncio_tools import cancel
from deployments.config import ShareConfig
from deployments.sharing import share_actor, share_member
from deployments.sharing.share_actor import ShareSpec
from deployments.sharing.share_member import ShareMember
from engines.core.resources import MemoryUse
from engines.gang.arbiter import IDLE
from engines.gang.share_group import REPLACED_SILENT_S, SILENT_S, ShareOrder, ShareReport
from tests.support.patience import PATIENCE_S


async def test_each_answer_says_how_long_the_model_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    orders = [ShareOrder(state="awake"), ShareOrder(state="asleep", wake_s=7.0), ShareOrder(state="awake", wake_s=0.5)]
    moves: list[tuple[bool, float]] = []
    foreseen_s: list[float] = []
    is_over = asyncio.Event()

    def exchange(report: ShareReport) -> asyncio.Future[ShareOrder]:
        answer: asyncio.Future[ShareOrder] = asyncio.get_running_loop().create_future()
        if orders:
            answer.set_result(orders.pop(0))
        else:
            is_over.set()
        return answer

    async def move(asleep: bool) -> Sequence[MemoryUse]:
        moves.append((asleep, foreseen_s[-1]))
        return ()

    actor = SimpleNamespace(exchange=SimpleNamespace(remote=exchange), leave=SimpleNamespace(remote=forget))
    monkeypatch.setattr(share_member, "share_actor", lambda spec: actor)
    member = ShareMember(cast("Any", None), "m", "denoiser", move=move, demand=lambda: IDLE)
    member.on_wake_s = foreseen_s.append
    await member.loaded(())
    await asyncio.wait_for(is_over.wait(), 60)
    await member.close()
    assert foreseen_s == [0.0, 7.0, 0.5]
    assert moves == [(True, 7.0), (False, 0.5)], "it is known before the weights move"


async def test_a_member_reports_while_its_weights_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long step delays the sleep. A silent member would count as gone, and another model take its GPUs."""
    states: list[str] = []
    may_end, has_moved = asyncio.Event(), asyncio.Event()

    async def exchange(report: ShareReport) -> ShareOrder:
        states.append(report.state)
        if len(states) == 5:
            may_end.set()
        if report.state == "asleep":
            has_moved.set()
            await asyncio.Event().wait()
        return ShareOrder(state="asleep" if len(states) > 1 else "awake")

    async def move(asleep: bool) -> Sequence[MemoryUse]:
        await may_end.wait()
        return ()

    actor = SimpleNamespace(exchange=SimpleNamespace(remote=exchange), leave=SimpleNamespace(remote=forget))
    monkeypatch.setattr(share_member, "share_actor", lambda spec: actor)
    monkeypatch.setattr(share_member, "ALIVE_S", 0.01)
    member = ShareMember(cast("Any", None), "m", "denoiser", move=move, demand=lambda: IDLE)
    await member.loaded(())
    await asyncio.wait_for(has_moved.wait(), PATIENCE_S)
    await member.close()
    assert states == ["awake"] * 5 + ["asleep"]


def test_members_report_often_enough() -> None:
    """An arbiter that is busy or restarts may miss a report."""
    longest_s = max(share_member.ALIVE_S, share_actor.POLL_S) + share_member.RETRY_S
    assert 3 * longest_s < SILENT_S
    assert longest_s < min(REPLACED_SILENT_S, share_actor.GATHER_S)


async def test_a_model_that_has_loaded_outlives_its_arbiter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed start would load all weights again."""
    reports: list[ShareReport] = []

    async def exchange(report: ShareReport) -> ShareOrder:
        reports.append(report)
        if len(reports) == 1:
            raise ActorDiedError
        return ShareOrder(state="awake", pinned=(7,))

    actor = SimpleNamespace(exchange=SimpleNamespace(remote=exchange), leave=SimpleNamespace(remote=forget))
    monkeypatch.setattr(share_member, "share_actor", lambda spec: actor)
    monkeypatch.setattr(share_member, "RETRY_S", 0.0)
    member = ShareMember(cast("Any", None), "m", "denoiser", move=cast("Any", None), demand=lambda: IDLE)
    assert await member.loaded((MemoryUse(weights=8),)) == (7,)
    await member.close()
    assert reports[1] == reports[0]


@pytest.fixture
def start_actor(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], share_actor.ShareActor]:
    """Return a function that makes an arbiter, restarted or not."""
    monkeypatch.setattr("deployments.replicas.prepare_replica", lambda: None)
    monkeypatch.setattr(share_actor, "POLL_S", 0.0)

    def start(is_restarted: bool) -> share_actor.ShareActor:
        context = SimpleNamespace(was_current_actor_reconstructed=is_restarted, current_actor="itself")
        monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
        return share_actor.ShareActor(ShareSpec(name="gpus", config=ShareConfig(), models=()))

    return start


StartActor = Callable[[bool], share_actor.ShareActor]
WAITING = ShareReport(model="m", stage="denoiser", token="t", state="waiting")


@pytest.mark.parametrize(("is_restarted", "state"), [(False, "loading"), (True, "waiting")])
async def test_an_arbiter_that_was_restarted_hears_all_members_first(
    start_actor: StartActor, is_restarted: bool, state: str
) -> None:
    actor = start_actor(is_restarted)
    assert (await actor.exchange(WAITING)).state == state
    assert not actor._newest, "members may be killed before they leave"
    assert actor._watch is not None
    await cancel(actor._watch)


async def test_an_arbiter_that_was_restarted_without_members_frees_the_gpus(
    start_actor: StartActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, freed = asyncio.Event(), list[object]()
    errors = [RuntimeError("Ray's head does not answer")]

    def remove(group: object) -> None:
        if errors:
            raise errors.pop()
        freed.append(group)

    monkeypatch.setattr(share_actor, "SILENT_S", 0.0)
    monkeypatch.setattr(share_actor, "UNUSED_S", 0.01)
    monkeypatch.setattr(ShareSpec, "actor_name", "gpus")
    monkeypatch.setattr(share_actor, "get_placement_group", lambda name: name)
    monkeypatch.setattr(share_actor, "remove_placement_group", remove)
    monkeypatch.setattr(ray, "kill", lambda actor: ended.set())
    start_actor(True)
    async with asyncio.timeout(PATIENCE_S):
        await ended.wait()
    assert freed == ["gpus"]


async def refuse(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("name", ["no such method here", "no such method there", "dead"])
async def test_an_arbiter_without_grants_only_delays_the_memory(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """An arbiter outlives the application that started it, and may be of an earlier version."""
    unknown: Exception = RayTaskError("grant", "", KeyError("grant"))  # type: ignore[no-untyped-call]
    errors = {"no such method there": unknown, "dead": ActorDiedError()}
    methods = {} if name not in errors else {"grant": SimpleNamespace(remote=lambda *_: refuse(errors[name]))}
    monkeypatch.setattr(share_member, "share_actor", lambda spec: SimpleNamespace(**methods))
    member = ShareMember(cast("Any", None), "m", "denoiser", move=cast("Any", None), demand=lambda: IDLE)
    assert await member.grant((MemoryUse(weights=7), MemoryUse(weights=8))) == (0, 0)


async def forget(token: str) -> None:
    """Let a member go."""
