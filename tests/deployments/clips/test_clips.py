"""Clips survive restarts, run once at a time, fail after too many attempts, and stop on request."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.clips import attempt
from deployments.clips.database import ClipRecord
from deployments.clips.store import Claims
from deployments.requests.bodies import VideoBody
from deployments.requests.recipe_choice import with_recipe
from deployments.requests.rules import Requester, RequestRules
from deployments.requests.validation import validated
from deployments.service.interface import ModelUnavailableError
from engines.core.engine import JobFailedError
from engines.gang.errors import GangBrokenError, QueueFullError
from pipelines.lora.source import LoraLimits
from pipelines.recipes import Recipe
from pipelines.request import NO_PICTURES, Lora
from pipelines.solver import Solver, SolverLimits
from tests.deployments.clips.support.runs import (
    QUICK,
    REQUEST,
    Looking,
    data_of,
    ended,
    failure_of,
    running,
    started,
    the,
)
from tests.deployments.support.fake_service import CLIPS, FailingService, FakeService, clip
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.usefixtures("each_database")


async def test_stop_and_start_again(tmp_path: Path, database_url: str) -> None:
    service = FakeService(step_s=1000)
    async with running(service, tmp_path, database_url=database_url) as clips:
        record = await clips.submit(REQUEST, "1")
        await started(service)
    assert len(service.closed) == 1
    second = FakeService()
    async with running(second, tmp_path, database_url=database_url) as clips:
        assert (await ended(clips, record.id)).status == "completed"
        assert await data_of(clips, record.id) == clip(REQUEST)
        assert (await the(clips, record.id)).attempts == 1  # a restart is no failure
    assert second.performed[0].seed == 77


SERVED = replace(CLIPS, solver=SolverLimits(scheduler="euler", schedulers=("euler", "heun")))
INK = Recipe(scheduler="heun", num_inference_steps=2, lora=(Lora(name="ink"),))
ALL: dict[str, Any] = {
    "defaults": {"fake-clips": SERVED},
    "loras": {"fake-clips": (Lora(name="ink"),)},
    "recipes": {"draft": INK},
    "attentions": ("auto", "fp8"),
    "runtime_loras": LoraLimits(),
}
"""A configuration that serves each of the requests below."""
ADDED = Lora(name="mine", folder="/data/loras/lora_1")


@pytest.mark.parametrize(
    ("asked", "change", "reason"),
    [
        ({"width": 128}, {"defaults": {"fake-clips": replace(SERVED, max_pixels=32 * 32)}}, "128x32"),
        ({"num_frames": 49}, {"defaults": {"fake-clips": replace(SERVED, max_frames=17)}}, "num_frames is 49"),
        ({"loras": (Lora(name="ink"),)}, {"loras": {}, "recipes": {}}, "served without an adapter 'ink'"),
        ({"loras": (ADDED,)}, {"runtime_loras": None}, "without adapters of clients, such as 'mine'"),
        ({"attention": "fp8"}, {"attentions": ("auto",)}, "attention is 'fp8'; fake-clips is served with auto"),
        ({"attention": "fp8"}, {"attentions": ("fp8",)}, None),
        ({"recipe": "draft"}, {"recipes": {}}, None),
        ({"recipe": "draft"}, {"recipes": {}, "loras": {}}, "served without an adapter 'ink'"),
        ({"recipe": "draft"}, {"defaults": {"fake-clips": CLIPS}}, "scheduler is 'heun'"),
        ({"solver": Solver(scheduler="heun")}, {"defaults": {"fake-clips": CLIPS}}, "scheduler is 'heun'"),
        ({"solver": Solver(scheduler="heun")}, {}, None),
    ],
)
async def test_a_clip_that_the_model_takes_no_longer_fails_by_the_rule(
    tmp_path: Path, asked: dict[str, Any], change: dict[str, Any], reason: str | None
) -> None:
    """The model's configuration changed between two starts."""
    first = FakeService(**ALL, reasons={"fake-clips": "not now"})
    request = REQUEST if "recipe" in asked else replace(REQUEST, **asked)
    if "recipe" in asked:
        card = first.cards()["fake-clips"]
        body = with_recipe(validated(VideoBody, {"prompt": "a", "size": "32x32", **asked}), card)
        request = RequestRules(card).check(body, NO_PICTURES, Requester(request_id="r"))
    async with running(first, tmp_path) as clips:
        record = await clips.submit(request, "1")
    second = FakeService(**(ALL | change))
    async with running(second, tmp_path) as clips:
        end = await ended(clips, record.id)
        if reason is None:
            assert (end.status, len(second.performed)) == ("completed", 1)
            return
        assert second.performed == []
        error = failure_of(end)
    assert error.code == "invalid_value"
    assert error.message.startswith("fake-clips is served in another way than when this was accepted")
    assert reason in error.message


async def test_a_deadline_does_not_go_by_a_clock_that_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock jumps two hours forward after the clip's record was written."""
    jumped = SimpleNamespace(time=lambda: time.time() + 7200, monotonic=time.monotonic)
    monkeypatch.setattr(attempt, "time", jumped)
    service = FakeService()
    async with running(service, tmp_path) as clips:
        clip_id, admission = await clips.begin(replace(REQUEST, deadline_s=600.0), "1")
        await admission
        await ended(clips, clip_id)
    assert service.performed[0].waited_s < 600


async def test_a_clip_that_was_begun_between_two_stops_is_queued_again(tmp_path: Path) -> None:
    """A request may be running when the server begins to stop."""
    service = FakeService(step_s=1000)
    async with running(service, tmp_path) as clips:
        await clips.stop()
        clip_id, _ = await clips.begin(REQUEST, "1")
        await started(service)
    assert len(service.closed) == 1
    async with running(FakeService(reasons={"fake-clips": "not now"}), tmp_path) as clips:
        record = await the(clips, clip_id)
    assert (record.status, record.attempts) == ("queued", 0)


def delay_give_back(monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.Event, asyncio.Event]:
    """Return an event that is set once a claim is given back, and one that lets this go on."""
    give_back, begun, may_go_on = Claims.give_back, asyncio.Event(), asyncio.Event()

    async def give_back_slowly(*arguments: Any, **options: Any) -> bool:
        begun.set()
        await may_go_on.wait()
        return await give_back(*arguments, **options)

    monkeypatch.setattr(Claims, "give_back", give_back_slowly)
    return begun, may_go_on


async def test_a_clip_that_is_taken_over_from_oneself_at_the_stop_is_queued_again(
    tmp_path: Path, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process was paused for longer than a claim lasts, and the earlier attempt takes time to end."""
    service, (is_ending, may_end) = FakeService(step_s=1000), delay_give_back(monkeypatch)
    async with running(service, tmp_path, max_concurrent_videos=2) as clips:
        record = await clips.submit(REQUEST, "1")
        await started(service)
        clock.now_s += QUICK["lease_s"] + 1
        async with asyncio.timeout(PATIENCE_S):
            await is_ending.wait()
        asyncio.get_running_loop().call_later(0.1, may_end.set)
    async with running(FakeService(reasons={"fake-clips": "not now"}), tmp_path) as clips:
        record = await the(clips, record.id)
    assert (record.status, record.attempts) == ("queued", 1)


async def test_a_clip_that_is_stopped_twice_is_queued_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server may be told to drain, and end meanwhile."""
    service, (is_ending, may_end) = FakeService(step_s=1000), delay_give_back(monkeypatch)
    async with running(service, tmp_path) as clips:
        record = await clips.submit(REQUEST, "1")
        await started(service)
        stopping = asyncio.create_task(clips.stop())
        async with asyncio.timeout(PATIENCE_S):
            await is_ending.wait()
        asyncio.get_running_loop().call_later(0.1, may_end.set)
        await clips.stop()
        await stopping
    async with running(FakeService(reasons={"fake-clips": "not now"}), tmp_path) as clips:
        record = await the(clips, record.id)
    assert (record.status, record.attempts) == ("queued", 0)


KILLED = """
    import asyncio, os, pathlib, sys
    sys.path.insert(0, {root!r})
    from tests.deployments.support.fake_service import FailingService, FakeService
    from tests.deployments.clips.support.runs import REQUEST, running

    def die(request, step):
        if step == 3:
            os.kill(os.getpid(), 9)

    async def main():
        place = {{"database_url": {url!r}, "lease_s": 3600}}
        async with running(FakeService(at_step=die), pathlib.Path({folder!r}), **place) as clips:
            await clips.submit(REQUEST, "1")
            await asyncio.Event().wait()

    asyncio.run(main())
"""


async def test_kill_9_in_the_middle_of_a_clip(tmp_path: Path, clock: SimpleNamespace, database_url: str) -> None:
    root = str(Path(__file__).parents[3])
    code = textwrap.dedent(KILLED.format(root=root, folder=str(tmp_path), url=database_url))
    process = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], timeout=PATIENCE_S)
    assert process.returncode == -9
    first, second = FakeService(), FakeService()
    place = {"database_url": database_url}
    async with running(first, tmp_path, **place) as clips, running(second, tmp_path, **place):
        (record,), _ = await clips.page(after=None, limit=10, ascending=True)
        assert (record.status, record.attempts) == ("in_progress", 1)
        clock.now_s = time.time() + 3601  # its claim has expired
        record = await ended(clips, record.id)
        assert (record.status, record.attempts) == ("completed", 2)
        assert await data_of(clips, record.id) == clip(REQUEST)
    assert len(first.performed + second.performed) == 1, "one of the two remaining replicas"


async def outcome(service: FakeService, folder: Path) -> ClipRecord:
    async with running(service, folder) as clips:
        return await ended(clips, (await clips.submit(REQUEST, "1")).id)


async def test_tried_again_after_a_passing_failure(tmp_path: Path) -> None:
    record = await outcome(FailingService(RuntimeError("x"), QueueFullError(9, 0.05), OSError("y")), tmp_path)
    assert (record.status, record.attempts, record.error) == ("completed", 3, None)


async def test_a_deployment_that_is_away_is_no_attempt(tmp_path: Path) -> None:
    record = await outcome(FailingService(*[ModelUnavailableError("no denoiser took it", 0.02)] * 5), tmp_path)
    assert (record.status, record.attempts) == ("completed", 1)


@pytest.mark.parametrize(
    ("failures", "code", "attempts", "message"),
    [
        ([GangBrokenError("rank 1 died")], "gang_broken", 1, "rank 1 died"),
        ([JobFailedError("latents are NaN")], "job_failed", 1, "latents are NaN"),
        ([ValueError("prompt has 900 tokens")], "invalid_value", 1, "900 tokens"),
        ([RuntimeError("secret")] * 3, "internal", 3, "failed 3 times, the last time with RuntimeError"),
    ],
)
async def test_given_up(
    tmp_path: Path,
    failures: list[Exception],
    code: str,
    attempts: int,
    message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A wrong request leaves no traceback in the log."""
    record = await outcome(FailingService(*failures), tmp_path)
    assert (record.status, failure_of(record).code, record.attempts) == ("failed", code, attempts)
    assert message in failure_of(record).message
    assert "secret" not in failure_of(record).message
    lines = [line for line in caplog.records if line.message == "clip failed"]
    assert [bool(line.exc_info) for line in lines] == [code != "invalid_value"] * attempts
    assert {(line.clip_id, line.reason) for line in lines} == {(record.id, str(failures[0]))}  # type: ignore[attr-defined]


async def test_clip_that_kills_the_application(tmp_path: Path, clock: SimpleNamespace) -> None:
    """Its claim expires again and again without an outcome."""
    service = FakeService()
    async with running(service, tmp_path, lease_s=10.0) as clips:
        service.reasons["fake-clips"] = "not now"
        record = await clips.submit(REQUEST, "1")
        claims = clips._runner._claims
        for _ in range(3):
            claim = await claims.take(["fake-clips"])
            assert claim is not None
            clock.now_s += 11.0
        service.reasons.clear()
        record = await ended(clips, record.id)
    assert (record.status, failure_of(record).code) == ("failed", "gave_up")
    assert "3 times" in failure_of(record).message
    assert service.performed == []


async def test_models_that_are_not_ready_wait(tmp_path: Path) -> None:
    service = Looking(reasons={"fake-clips": "loading"})
    async with running(service, tmp_path) as clips:
        record = await clips.submit(REQUEST, "1")
        await service.looked()
        assert (await the(clips, record.id)).status == "queued"
        service.reasons.clear()
        assert (await ended(clips, record.id)).status == "completed"


async def test_queue_limit(tmp_path: Path) -> None:
    service = FakeService(reasons={"fake-clips": "loading"})
    async with running(service, tmp_path, max_waiting_videos=2) as clips:
        for _ in range(2):
            await clips.submit(REQUEST, "1")
        with pytest.raises(QueueFullError, match="2 jobs are waiting"):
            await clips.submit(REQUEST, "1")


async def test_queue_limit_of_those_that_come_at_once(tmp_path: Path) -> None:
    service = FakeService(reasons={"fake-clips": "loading"})
    async with running(service, tmp_path, max_waiting_videos=2) as clips:
        outcomes = await asyncio.gather(*(clips.submit(REQUEST, "1") for _ in range(5)), return_exceptions=True)
        assert [type(one) for one in outcomes].count(QueueFullError) == 3
        queued, _ = await clips.page(after=None, limit=10, ascending=True)
        assert len(queued) == 2


async def test_side_by_side_up_to_the_limit(tmp_path: Path) -> None:
    service = FakeService(step_s=1000)
    async with running(service, tmp_path, max_concurrent_videos=2) as clips:
        for _ in range(3):
            await clips.submit(REQUEST, "1")
        await started(service, 2)
        await asyncio.sleep(0.2)
        assert len(service.performed) == 2


async def test_old_clips_are_swept(tmp_path: Path, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.clips.clips.SWEEP_EVERY_S", 0.05)
    async with running(FakeService(), tmp_path, keep_videos_s=3600.0) as clips:
        record = await clips.submit(REQUEST, "1")
        await ended(clips, record.id)
        assert await data_of(clips, record.id, "thumbnail")
        clock.now_s += 3601.0
        async with asyncio.timeout(PATIENCE_S):
            while await clips.get(record.id) or list((tmp_path / "videos").iterdir()):
                await asyncio.sleep(0.05)


async def test_a_database_that_is_away_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = FakeService()
    async with running(service, tmp_path) as clips:
        calls = 0

        async def not_ready() -> dict[str, str]:
            nonlocal calls
            calls += 1
            if calls < 3:
                raise OSError("away")
            return {}

        monkeypatch.setattr(service, "not_ready", not_ready)
        record = await clips.submit(REQUEST, "1")
        assert (await ended(clips, record.id)).status == "completed"
