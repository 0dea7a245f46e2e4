"""A client's predicted time adds the gang's steps and the measured decoding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from deployments.service import flow, retries, run
from deployments.service.flow import DeployedService
from deployments.service.interface import Media, Output, Queued, ServiceEvent
from deployments.service.readiness import Readiness
from deployments.stages.common import Decoded
from engines.gang.errors import GangBrokenError
from engines.gang.jobs.job import JobDone, JobQueued, Progress
from tests.deployments.service.support.set_stages import Stages
from tests.deployments.support.fake_service import PICTURES

STEP = Progress(job_id="j", step=1, num_steps=1, num_ranks=2)
DONE = JobDone(job_id="j", latents="latents", queue_s=0.0, denoise_s=1.0, was_warm=True)  # type: ignore[arg-type]
GUESSED, KNOWN = JobQueued(job_id="j", eta_s=None), JobQueued(job_id="j", eta_s=2.0)
REQUEST = PICTURES.request(model="m", prompt="a red circle")


async def all_told(patch: pytest.MonkeyPatch, stages: Stages, *widths: int) -> list[tuple[Queued, Media]]:
    """Return the first and last event of a request for each width, by the clock of ``stages``."""
    stages.set_clock_of(retries, run, patch=patch)
    handles: Any = {"m": stages}
    service, told = DeployedService({}, handles, Readiness({"m": ()})), []
    for width in widths:
        request = replace(REQUEST, width=width)
        events: list[ServiceEvent] = [event async for event in service.perform(request, Output(format="png"))]
        assert isinstance(events[0], Queued)
        assert isinstance(events[-1], Media)
        told.append((events[0], events[-1]))
    return told


async def test_a_whole_time_is_predicted_when_all_its_parts_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first decoding is unknown; the others take 0.1 s for as many pixels."""
    stages = Stages([KNOWN, STEP, DONE], [GUESSED, STEP, DONE], [0.5, KNOWN, STEP, DONE])
    told = await all_told(monkeypatch, stages, REQUEST.width, REQUEST.width, 2 * REQUEST.width)
    assert [queued.eta_s for queued, _ in told] == [None, None, pytest.approx(0.5 + 2.0 + 2 * 0.1)]
    assert [media.timings.eta_s for _, media in told] == [queued.eta_s for queued, _ in told]


async def test_the_first_whole_time_after_a_start_is_predicted_by_what_the_decoder_remembers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A size that was decoded since uses that time."""
    stages = Stages([KNOWN, STEP, DONE])
    stages.expected_s = 5.0
    (first, media), (second, _) = await all_told(monkeypatch, stages, REQUEST.width, REQUEST.width)
    assert (first.decode_s, second.decode_s) == (5.0, 0.1)
    assert first.eta_s == media.timings.eta_s == pytest.approx(7.0)


async def test_the_ways_from_stage_to_stage_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second before the gang has the job is past by then; of the 1.3 s after it, the gang takes one."""
    stages = Stages([0.5, KNOWN, STEP, 1.3, DONE])
    (_, media), (second, _) = await all_told(monkeypatch, stages, REQUEST.width, REQUEST.width)
    assert media.timings.total_s == pytest.approx(1.8)
    assert second.decode_s == pytest.approx(0.3)
    assert second.eta_s == pytest.approx(0.5 + 2.0 + 0.3)


@pytest.mark.parametrize("deadline_s", [60.0, None])
async def test_a_deadline_is_that_of_the_whole(monkeypatch: pytest.MonkeyPatch, deadline_s: float | None) -> None:
    """The gang, which knows of steps alone, gets the elapsed time and the predicted decoding: by the decoder, and by
    later measurements."""
    lost = GangBrokenError("rank 1 died", "death", in_flight=True)
    stages = Stages([GUESSED, STEP, 5.0, lost], [GUESSED, STEP, DONE])
    stages.expected_s = 4.0
    stages.set_clock_of(retries, run, patch=monkeypatch)
    monkeypatch.setattr(flow, "RETRY_PAUSE_S", 0.0)
    handles: Any = {"m": stages}
    service = DeployedService({}, handles, Readiness({"m": ()}))
    for request in (REQUEST, replace(REQUEST, width=2 * REQUEST.width, waited_s=2.0 if deadline_s else 0.0)):
        asked = replace(request, deadline_s=deadline_s)
        _ = [event async for event in service.perform(asked, Output(format="png"))]
        stages.expected_s = None
    told = stages.all_sent["denoise"]
    assert [args[1].waited_s for args in told] == pytest.approx([0.0, 5.0, 2.0] if deadline_s else [0.0] * 3)
    assert [args[4] for args in told] == pytest.approx([4.0, 4.0, 2 * 0.1])
    assert {args[1].deadline_s for args in told} == {deadline_s}


async def test_one_slow_decode_says_nothing_of_the_next() -> None:
    stages = Stages([KNOWN, STEP, DONE])
    handles: Any = {"m": stages}
    service, told_s = DeployedService({}, handles, Readiness({"m": ()})), []
    for decode_s in (0.1, 0.1, 9.0, 0.1):
        stages.decoded = Decoded(data=b"png", thumbnail=b"", decode_s=decode_s)
        events = [event async for event in service.perform(REQUEST, Output(format="png"))]
        assert isinstance(events[0], Queued)
        told_s.append(events[0].decode_s)
    assert told_s == [None, 0.1, 0.1, 0.1]
