"""Values passed between deployments stay available for a late reader: an ingress may be busy.

Ray drops an object that an item of a stream refers to, if the item comes before it is requested.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import serve

from deployments.names import APPLICATION, CODEC, deployment_name
from deployments.service.flow import DeployedService
from deployments.service.interface import Media, Output, Preview, ServiceEvent
from deployments.service.readiness import Readiness
from deployments.service.run import StageHandles
from pipelines.request import MediaRequest
from tests.deployments.support.bare import bare_request
from tests.deployments.support.live import log_lines, wait_until
from tests.end_to_end.conftest import PICTURES

NUM_FINISHED = 4
"""More than the objects that are still on their way when the last request is over."""


@pytest.fixture
def handles(url: str) -> dict[str, Any]:
    codec = f"{CODEC}-{PICTURES}"
    names = {"text_encoder": codec, "denoiser": deployment_name("denoiser", PICTURES), "decoder": codec}
    return {stage: serve.get_deployment_handle(name, APPLICATION) for stage, name in names.items()}


def ended(request: MediaRequest) -> bool:
    """Return whether both ranks have ended the request."""
    lines = log_lines("job ends")
    return {0, 1} == {line["rank"] for line in lines if line["request_id"] == request.request_id}


async def read_late(events: AsyncGenerator[ServiceEvent], is_over: Callable[[], bool]) -> list[ServiceEvent]:
    """Read the first event, then block this process until the job is over."""
    seen = [await anext(events)]
    wait_until(is_over, "the job ends on its ranks")  # this blocks the thread's event loop
    return seen + [event async for event in events]


async def test_latents_that_are_read_late_are_there(handles: dict[str, Any], models: dict[str, Path]) -> None:
    request = replace(bare_request(models, partial_images=3)[0], request_id="late")
    service = DeployedService({}, {PICTURES: StageHandles(**handles)}, Readiness({PICTURES: ()}))
    events = await read_late(service.perform(request, Output(format="png")), lambda: ended(request))
    assert [event.index for event in events if isinstance(event, Preview)] == [0, 1, 2]
    assert isinstance(events[-1], Media)
    jobs = {line["gang_job_id"] for line in log_lines("job begins") if line["request_id"] == request.request_id}
    assert len(jobs) == 1, "nothing was lost, for which it would have been run again"


async def test_no_deployment_hands_out_references(handles: dict[str, Any], models: dict[str, Path]) -> None:
    """A conditioning lost in this way would cost a run of its request."""
    request, _ = bare_request(models, partial_images=1)
    encoding = handles["text_encoder"].encode.remote(request)
    encoded = [await encoding._to_object_ref()]
    stream = handles["denoiser"].options(stream=True).denoise.remote("id", request, encoded)
    items = [await encoding, *[group async for group in stream]]
    assert [references(item) for item in items] == [[]] * len(items)


async def test_finished_requests_leave_nothing_in_their_callers_process(
    handles: dict[str, Any], models: dict[str, Path]
) -> None:
    """Ray 2.60 keeps a small object for ever if another process still holds it when the call that got it ends."""
    request, _ = bare_request(models, partial_images=0)
    service = DeployedService({}, {PICTURES: StageHandles(**handles)}, Readiness({PICTURES: ()}))
    worker: Any = ray._private.worker.global_worker
    kept = worker.core_worker.get_memory_store_size
    before = kept()
    for number in range(NUM_FINISHED):
        one = replace(request, request_id=f"finished-{number}")
        assert isinstance([event async for event in service.perform(one, Output(format="png"))][-1], Media)
    wait_until(lambda: kept() < before + NUM_FINISHED, "the objects of requests are freed")


def references(value: object) -> list[Any]:
    context = ray._private.worker.global_worker.get_serialization_context()  # type: ignore[no-untyped-call]
    return list(context.serialize(value).contained_object_refs)


def test_references_are_seen(url: str) -> None:
    assert len(references((1, [ray.put(1)]))) == 1
