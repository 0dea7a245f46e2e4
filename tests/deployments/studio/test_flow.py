"""A request on its way through the stages: what is told meanwhile, and what happens when it loses its gang."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.stages.common import Decoded
from deployments.studio import flow
from deployments.studio.flow import RECOVERY_DEADLINE_S, DeployedStudio
from deployments.studio.interface import Media, Output, Preview, Progress, StudioEvent
from deployments.studio.readiness import Readiness
from engines.gang.errors import GangBrokenError, QueueFullError
from engines.gang.job import JobDone, JobEvent, PreviewReady, StepDone
from pipelines.request import MediaRequest
from tests.deployments.support.fake_studio import PICTURES
from tests.support.patience import PATIENCE_S

STEP = StepDone(job_id="j", step=1, num_steps=1, step_ms=1.0, num_ranks=2)
DONE = JobDone(job_id="j", latents=None, queue_s=0.0, denoise_s=1.0, was_warm=True)  # type: ignore[arg-type]
BROKEN = GangBrokenError("rank 1 died", "death", in_flight=True)
WAITED_BESIDE = GangBrokenError("rank 1 died", "death", in_flight=False)

Act = JobEvent | Exception | float
"""What happens in an attempt: an event, the error it ends with, or seconds that pass."""


class Answer:
    """What calling a deployment returns."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __await__(self) -> Generator[Any, Any, Any]:
        yield from ()
        return self._value

    async def _to_object_ref(self) -> None:
        return None


class Stages:
    """The three deployments of a model. The gang of each attempt does what ``attempts`` say, the last one for ever."""

    def __init__(self, *attempts: list[Act]) -> None:
        self._attempts = attempts
        self.num_attempts, self.now_s = 0, 1000.0
        self.text_encoder = SimpleNamespace(encode=remote(lambda *_: Answer(SimpleNamespace(encode_s=0.1))))
        self.denoiser = SimpleNamespace(options=lambda **_: SimpleNamespace(denoise=remote(self._denoise)))
        decoded = Decoded(data=b"png", thumbnail=b"", decode_s=0.1)
        self.decoder = SimpleNamespace(decode=remote(lambda *_: Answer(decoded)), preview=remote(self.preview))
        self.previews_may_go_on = asyncio.Event()

    async def preview(self, latents: list[Any], _: MediaRequest) -> bytes:
        await self.previews_may_go_on.wait()
        return f"preview of {latents[0]}".encode()

    def _denoise(self, *_: object) -> Any:
        acts = self._attempts[min(self.num_attempts, len(self._attempts) - 1)]
        self.num_attempts += 1
        return Stream(self._run(acts))

    async def _run(self, acts: list[Act]) -> AsyncGenerator[tuple[JobEvent, ...]]:
        for act in acts:
            if isinstance(act, Exception):
                raise act
            if isinstance(act, float):
                self.now_s += act
            else:
                yield (act,)


class Stream:
    def __init__(self, groups: AsyncGenerator[tuple[JobEvent, ...]]) -> None:
        self._groups = groups

    def __aiter__(self) -> AsyncGenerator[tuple[JobEvent, ...]]:
        return self._groups

    def cancel(self) -> None: ...


def remote(function: Callable[..., Any]) -> SimpleNamespace:
    return SimpleNamespace(remote=function)


@pytest.fixture
def perform(monkeypatch: pytest.MonkeyPatch) -> Callable[[Stages], Any]:
    """Runs a request through ``Stages``, by their clock; what comes at the end."""
    monkeypatch.setattr(flow, "RETRY_PAUSE_S", 0.0)
    for name in ("observe_failure", "observe_stage"):
        monkeypatch.setattr(flow, name, lambda *_: None)

    async def run(stages: Stages) -> Any:
        clock = SimpleNamespace(monotonic=lambda: stages.now_s, perf_counter=lambda: stages.now_s)
        monkeypatch.setattr(flow, "time", clock)
        request = PICTURES.request(model="m", prompt="a red circle")
        events = studio_of(stages).perform(request, Output(format="png"))
        return [event async for event in events][-1]

    return run


def studio_of(stages: Stages) -> DeployedStudio:
    return DeployedStudio({}, {"m": stages}, Readiness(["m"]))  # type: ignore[dict-item]


async def test_progress_does_not_wait_for_previews(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "observe_stage", lambda *_: None)
    first, second = (PreviewReady(job_id="j", step=step, latents=f"latents {step}") for step in (1, 2))  # type: ignore[arg-type]
    stages = Stages([STEP, first, STEP, second, STEP, DONE])
    events: list[StudioEvent] = []
    async with asyncio.timeout(PATIENCE_S):
        async for event in studio_of(stages).perform(
            PICTURES.request(model="m", prompt="a red circle"), Output(format="png")
        ):
            events.append(event)
            if sum(isinstance(event, Progress) for event in events) == 3:
                stages.previews_may_go_on.set()
    assert [type(event) for event in events] == [Progress] * 3 + [Preview] * 2 + [Media]
    previews = [event for event in events if isinstance(event, Preview)]
    assert [(one.index, one.step, one.data) for one in previews] == [
        (0, 1, b"preview of latents 1"),
        (1, 2, b"preview of latents 2"),
    ]


async def test_a_request_that_ran_for_long_is_run_again(perform: Callable[[Stages], Any]) -> None:
    stages = Stages([STEP, 10 * RECOVERY_DEADLINE_S, BROKEN], [STEP, DONE])
    assert isinstance(await perform(stages), Media)
    assert stages.num_attempts == 2


async def test_a_request_that_ran_for_long_waits_for_room_in_the_next_gang(perform: Callable[[Stages], Any]) -> None:
    full = QueueFullError(4, 1.0)
    stages = Stages([STEP, 10 * RECOVERY_DEADLINE_S, BROKEN], [full], [STEP, DONE])
    assert isinstance(await perform(stages), Media)
    assert stages.num_attempts == 3


async def test_two_broken_gangs_are_enough(perform: Callable[[Stages], Any]) -> None:
    stages = Stages([STEP, BROKEN])
    with pytest.raises(GangBrokenError, match="given up after 2 broken gangs; the last: rank 1 died"):
        await perform(stages)
    assert stages.num_attempts == 2


async def test_a_request_that_never_gets_to_run_is_given_up_in_time(perform: Callable[[Stages], Any]) -> None:
    stages = Stages([RECOVERY_DEADLINE_S / 4, WAITED_BESIDE])
    with pytest.raises(GangBrokenError, match="given up after 0 broken gangs"):
        await perform(stages)
    assert stages.num_attempts == 6


async def test_a_full_queue_is_told_at_once(perform: Callable[[Stages], Any]) -> None:
    stages = Stages([QueueFullError(4, 1.0)])
    with pytest.raises(QueueFullError):
        await perform(stages)
    assert stages.num_attempts == 1
