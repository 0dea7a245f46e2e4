"""A denoiser describes a job to a simulated gang."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import TaskCancelledError

from deployments.app import HEALTH
from deployments.stages import common
from deployments.stages import denoiser as stage
from deployments.stages.common import CHECK_S, Encoded, EncodingDone, HealthCheckPace
from deployments.stages.denoiser import Denoiser, node_environment
from deployments.stages.replica_load import ReplicaLoad
from engines.gang.errors import GangBrokenError, QueueFullError
from engines.gang.jobs.job import Job, Progress
from pipelines.models.mini_max_h3.spec import SPEC
from pipelines.request import Lora, MediaRequest
from tests.deployments.support.fake_service import PICTURES

ENCODED = Encoded(skeleton=b"", message=np.zeros(0, np.uint8), encode_s=0.5, shapes=(("prompt_embeds", (1, 7, 4)),))
STEPS = [Progress(job_id="j", step=step, num_steps=2, num_ranks=2) for step in (1, 2)]


class Unstarted(Denoiser):
    """Has ``parts`` in place of a start's results, and nothing to end: a dropped one is not awaited."""

    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)

    def __del__(self) -> None: ...  # type: ignore[override]


async def events_of(*acts: Progress | Exception) -> list[tuple[Any, ...]]:
    return (await submitted(PICTURES.request(model="m", prompt="a"), ENCODED, *acts))[1]


async def submitted(
    request: MediaRequest, encoding: Encoded, *acts: Progress | Exception, decode_s: float = 0.0
) -> tuple[Job, list[tuple[Any, ...]]]:
    """Return the job that reaches the gang, and its events."""
    encoded: asyncio.Future[Encoded] = asyncio.get_running_loop().create_future()
    encoded.set_result(encoding)
    jobs, events = await submitted_with(request, encoded, *acts, decode_s=decode_s)
    return jobs[0], events


async def submitted_with(
    request: MediaRequest, encoded: asyncio.Future[Encoded], *acts: Progress | Exception, decode_s: float = 0.0
) -> tuple[list[Job], list[tuple[Any, ...]]]:
    """Return the jobs that reach the gang, and the events of the call."""
    jobs: list[Job] = []

    async def submit_grouped(job: Job, *, every_s: float) -> AsyncGenerator[tuple[Progress, ...]]:
        jobs.append(job)
        for act in acts:
            if isinstance(act, Exception):
                raise act
            yield (act,)

    num_steps = replace(PICTURES, max_pictures=1, takes_strength=True, strength=0.6).num_steps_of
    gang: Any = SimpleNamespace(submit_grouped=submit_grouped, estimates=None)
    denoiser = Unstarted(
        _name="a1b2",
        _gang=gang,
        _load=ReplicaLoad(gang, start_s=1.0, node_id="0a", head_id="0b"),
        _checkpoint=SimpleNamespace(num_steps=num_steps, spec=SPEC),
    )
    references: Any = [encoded]
    events = [group async for group in denoiser.denoise("j", request, references, decode_s=decode_s)]
    assert not (jobs and references), "frames of a cancelled call would hold the conditioning beyond its end"
    return jobs, events


async def test_the_first_group_says_how_long_the_encoding_took() -> None:
    assert await events_of(*STEPS) == [(EncodingDone(encode_s=0.5), STEPS[0]), (STEPS[1],)]


async def test_a_wrong_request_is_an_event_and_a_defect_is_raised() -> None:
    """Serve logs a traceback of every exception."""
    wrong, request = ValueError("the adapter 'ink' is for another model"), PICTURES.request(model="m", prompt="a")
    assert await events_of(STEPS[0], wrong) == [(EncodingDone(encode_s=0.5), STEPS[0]), (wrong,)]
    encoded: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    encoded.set_result(wrong)
    assert await submitted_with(request, encoded) == ([], [(wrong,)])
    with pytest.raises(UnicodeError):
        await events_of(UnicodeError("a defect"))


async def test_a_job_says_what_decoding_will_take() -> None:
    job, _ = await submitted(PICTURES.request(model="m", prompt="a", deadline_s=9.0), ENCODED, *STEPS, decode_s=3.0)
    assert job.left_s == pytest.approx(6.0, abs=0.5)


async def test_a_picture_to_paint_over_spares_steps() -> None:
    request = replace(PICTURES.request(model="m", prompt="a"), num_inference_steps=10)
    for changes, num in (({}, 10), ({"num_pictures": 1}, 6), ({"num_pictures": 1, "strength": 0.25}, 3)):
        job, _ = await submitted(replace(request, **changes), ENCODED, *STEPS)
        assert job.num_steps == num


async def test_a_clip_without_sound_has_another_shape() -> None:
    asked = [PICTURES.request(model="m", prompt="a", sound=sound) for sound in (None, False)]
    one, silent = [(await submitted(request, ENCODED, *STEPS))[0].shape for request in asked]
    assert one != silent


async def test_jobs_share_a_shape_if_what_was_encoded_does() -> None:
    request = PICTURES.request(model="m", prompt="a")
    longer = replace(ENCODED, shapes=(("prompt_embeds", (1, 8, 4)),))
    one, same, other = [(await submitted(request, each, *STEPS))[0].shape for each in (ENCODED, ENCODED, longer)]
    assert one == same != other
    assert len({one, same, other}) == 2


async def test_a_job_with_long_references_is_estimated_longer() -> None:
    request, prompt = PICTURES.request(model="m", prompt="a"), ENCODED.shapes
    sizes = ((1, 24, 1, 8, 14), (1, 24, 1, 16, 28), (1, 24, 37, 48, 84))
    encoded = (ENCODED, *(replace(ENCODED, shapes=(("condition_latents.0", size), *prompt)) for size in sizes))
    jobs = [(await submitted(request, one, *STEPS))[0] for one in encoded]
    times_s = [job.estimates_s[1] for job in jobs]
    assert times_s == sorted(set(times_s))


async def test_jobs_with_equal_adapters_have_equal_additions() -> None:
    """The order does not matter, and those of scale 0 are left out; scales differ."""
    request = PICTURES.request(model="m", prompt="a")
    one, other, none = Lora(name="one", scale=0.8), Lora(name="two"), Lora(name="none", scale=0.0)
    sets: tuple[tuple[Lora, ...], ...] = ((one, other), (other, none, one), (one,), (replace(one, scale=0.7),), ())
    jobs = [(await submitted(replace(request, loras=loras), ENCODED, *STEPS))[0] for loras in sets]
    assert jobs[0].additions == jobs[1].additions
    assert len({job.additions for job in jobs}) == 4
    assert jobs[-1].additions == Job(job_id="j", request=None, conditioning=None, num_steps=1).additions


async def test_a_client_that_leaves_during_the_encoding_is_no_error() -> None:
    encoded: asyncio.Future[Encoded] = asyncio.get_running_loop().create_future()
    encoded.set_exception(TaskCancelledError())
    assert await submitted_with(PICTURES.request(model="m", prompt="a"), encoded, *STEPS) == ([], [])


async def test_what_ends_jobs_every_day_is_told_and_not_raised() -> None:
    """Serve would log a traceback for each."""
    refused, broken = QueueFullError(4, 1.5), GangBrokenError("a rank died", "death", in_flight=True)
    assert await events_of(refused) == [(refused,)]
    assert (await events_of(*STEPS, broken))[-1] == (broken,)
    assert broken.replica == "a1b2", "the one that takes no more jobs"


class Breaking:
    """A healthy gang that breaks once it is waited for."""

    def __init__(self) -> None:
        self.is_broken = False

    async def check_health(self) -> None:
        if self.is_broken:
            raise GangBrokenError("a rank died", "death")

    async def breaks_within(self, seconds: float) -> bool:
        assert 0 < seconds < HEALTH["health_check_period_s"], "the next check is due then"
        self.is_broken = True
        return True


async def test_a_health_check_under_way_fails_as_soon_as_the_gang_breaks() -> None:
    denoiser = Unstarted(_gang=Breaking(), _pace=HealthCheckPace(), _check=None)
    await denoiser.check_health()  # Serve waits for the first one before it admits requests
    with pytest.raises(GangBrokenError):
        await denoiser.check_health()


async def test_health_checks_that_were_held_up_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray starts no call while a hanging ingress owes an answer; Serve's timeout runs meanwhile."""
    now_s = 100.0
    monkeypatch.setattr(common, "time", SimpleNamespace(monotonic=lambda: now_s))
    gang = Breaking()
    denoiser = Unstarted(_gang=gang, _pace=HealthCheckPace(), _check=None)
    await denoiser.check_health()
    now_s += 4.0
    await asyncio.gather(*(denoiser.check_health() for _ in range(3)))
    assert not gang.is_broken, "none of them waited"
    now_s += 1.1
    with pytest.raises(GangBrokenError):
        await denoiser.check_health()


async def test_a_health_check_waits_for_what_its_pings_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole call stays below Serve's timeout, and ends before the next one is due."""
    now_s, ping_s, waited_s = 100.0, 0.0, list[float]()

    class Pinged:
        async def check_health(self) -> None:
            nonlocal now_s
            now_s += ping_s

        async def breaks_within(self, seconds: float) -> bool:
            waited_s.append(seconds)
            return False

    monkeypatch.setattr(common, "time", SimpleNamespace(monotonic=lambda: now_s))
    denoiser = Unstarted(_gang=Pinged(), _pace=HealthCheckPace(), _check=None)
    for ping_s in (0.0, 0.25, 1.2, 0.0):  # the last but one is slow, so the last does not wait
        await denoiser.check_health()
        now_s += ping_s
    assert waited_s == [pytest.approx(CHECK_S - 0.25)]


class Slow:
    """A gang whose check takes as long as the test says."""

    def __init__(self) -> None:
        self.is_checked = asyncio.Event()

    async def check_health(self) -> None:
        await self.is_checked.wait()

    async def breaks_within(self, seconds: float) -> bool:
        return False


async def test_health_checks_that_overlap_share_their_result() -> None:
    """A blocked event loop causes this: Serve drops a check and sends the next one."""
    gang = Slow()
    denoiser = Unstarted(_gang=gang, _pace=HealthCheckPace(), _check=None)
    checks = [asyncio.ensure_future(denoiser.check_health()) for _ in range(2)]
    await asyncio.sleep(0)
    gang.is_checked.set()
    await asyncio.gather(*checks)


def test_ranks_start_with_the_variables_of_their_engine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "is_on_loopback", lambda: False)
    assert node_environment("torch") == {}
