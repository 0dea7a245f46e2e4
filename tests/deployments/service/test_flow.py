"""A request passes through the stages: its events, and its retry after a lost gang."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ReferenceCountingAssertionError
from ray.serve.exceptions import DeploymentUnavailableError

from deployments.service import flow
from deployments.service.flow import DeployedService
from deployments.service.interface import (
    WHOLE,
    Media,
    ModelCard,
    ModelPath,
    ModelUnavailableError,
    Output,
    Preview,
    ServiceEvent,
)
from deployments.service.readiness import Readiness
from deployments.service.retries import MAX_LOSSES, RECOVERY_DEADLINE_S
from deployments.stages.common import SentMedia, SentPictures
from engines.gang.errors import DEADLINE, GangBrokenError, QueueFullError, TooLateError
from engines.gang.jobs.job import JobDone, JobQueued, PreviewReady, Progress
from pipelines.request import InputPicture, InputPictures, Lora
from tests.deployments.service.support.set_stages import Stages
from tests.deployments.support.fake_service import EDITS, PICTURES
from tests.deployments.support.files import noise
from tests.support.patience import PATIENCE_S

STEP = Progress(job_id="j", step=1, num_steps=1, num_ranks=2)
DONE = JobDone(job_id="j", latents="latents", queue_s=0.0, denoise_s=1.0, was_warm=True)  # type: ignore[arg-type]
BROKEN = GangBrokenError("rank 1 died", "death", in_flight=True)
WAITED_BESIDE = GangBrokenError("rank 1 died", "death", in_flight=False)
LOST = ReferenceCountingAssertionError("00ff", None, "")
DIED = ActorDiedError()
pytestmark = pytest.mark.usefixtures("no_pause")
FIRST, SECOND = (PreviewReady(job_id="j", step=step, latents=f"latents {step}") for step in (1, 2))  # type: ignore[arg-type]


def service_of(stages: Stages, **patience_s: float) -> DeployedService:
    return DeployedService({}, {"m": stages}, Readiness({"m": ()}), patience_s)  # type: ignore[dict-item]


async def test_progress_does_not_wait_for_previews() -> None:
    stages = Stages([STEP, FIRST, STEP, SECOND, STEP, DONE])
    events: list[ServiceEvent] = []
    async with asyncio.timeout(PATIENCE_S):
        async for event in service_of(stages).perform(
            PICTURES.request(model="m", prompt="a red circle"), Output(format="png")
        ):
            events.append(event)
            if sum(isinstance(event, Progress) for event in events) == 3:
                stages.previews_may_go_on.set()
    assert [type(event) for event in events] == [Progress] * 3 + [Preview] * 2 + [Media]
    assert all(event is STEP for event in events[:3]), "the gang's own event goes on to the client"
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


async def test_a_deadline_goes_on_while_a_gang_is_rebuilt(events_of: Callable[..., Any]) -> None:
    """The first gang hears that no time has passed, the second the time on the first."""
    stages = Stages([STEP, 7.0, BROKEN], [STEP, DONE])
    await events_of(stages, deadline_s=60.0)
    requests = [args[1] for args in stages.all_sent["denoise"]]
    assert [(one.deadline_s, one.waited_s) for one in requests] == [(60.0, 0.0), (60.0, 7.0)]


async def test_a_gang_is_told_what_decoding_will_take(events_of: Callable[..., Any]) -> None:
    """The decoder says it for a new size; 0 means unknown."""
    for expected_s, told_s in ((None, 0.0), (2.5, 2.5)):
        stages = Stages([STEP, DONE])
        stages.expected_s = expected_s
        await events_of(stages, deadline_s=60.0)
        assert stages.sent["denoise"][4] == told_s


async def test_the_whole_time_begins_when_the_request_came(events_of: Callable[..., Any]) -> None:
    """Time on a lost gang counts, in the prediction too."""
    stages = Stages([STEP, 7.0, BROKEN], [2.0, JobQueued(job_id="j", eta_s=3.0), STEP, DONE])
    stages.expected_s = 0.5
    _, queued, *_, media = await events_of(stages)
    assert (queued.eta_s, media.timings.eta_s, media.timings.total_s) == pytest.approx((12.5, 12.5, 9.0))


async def test_what_came_too_late_for_its_deadline_is_not_tried_on(events_of: Callable[..., Any]) -> None:
    late = TooLateError(0, 3.0, 63.0, DEADLINE, 60.0)
    stages = Stages([STEP, BROKEN], [late], [STEP, DONE])
    with pytest.raises(TooLateError):
        await events_of(stages, deadline_s=60.0)
    assert stages.num_attempts == 2


async def test_a_gang_that_broke_is_not_asked_again(
    perform: Callable[[Stages], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve's controller may learn of it much later."""
    left: list[tuple[object, str]] = []
    monkeypatch.setattr(flow, "leave_replica", lambda handle, replica: left.append((handle, replica)))
    broken = GangBrokenError("rank 1 died", "death", in_flight=True)
    broken.replica = "a1b2"
    stages = Stages([STEP, broken], [DIED], [STEP, DONE])
    assert isinstance(await perform(stages), Media)
    assert left == [(stages.denoiser, "a1b2")], "Serve itself leaves a replica that died"
    with pytest.raises(GangBrokenError, match="given up"):
        await perform(Stages([STEP, broken]))
    assert len(left) == 3, "the last one too, for the requests after this one"


async def test_two_broken_gangs_are_enough(perform: Callable[[Stages], Any]) -> None:
    stages = Stages([STEP, BROKEN])
    with pytest.raises(GangBrokenError, match="given up after 2 broken gangs; the last: rank 1 died"):
        await perform(stages)
    assert stages.num_attempts == 2


async def test_a_request_that_never_gets_to_run_is_given_up_in_time(perform: Callable[[Stages], Any]) -> None:
    """It is not the cause, so it may be sent again."""
    stages = Stages([RECOVERY_DEADLINE_S / 4, WAITED_BESIDE])
    with pytest.raises(ModelUnavailableError, match="no gang ran this request within 180 s"):
        await perform(stages)
    assert stages.num_attempts == 6


async def test_a_full_queue_is_told_at_once(perform: Callable[[Stages], Any]) -> None:
    stages = Stages([QueueFullError(4, 1.0)])
    with pytest.raises(QueueFullError):
        await perform(stages)
    assert stages.num_attempts == 1


async def test_lost_objects_are_no_broken_gangs(perform: Callable[[Stages], Any]) -> None:
    """After two broken gangs the request would fail, and after one it would run alone."""
    stages = Stages([STEP, LOST], [LOST], [STEP, BROKEN], [STEP, LOST], [STEP, DONE])
    assert isinstance(await perform(stages), Media)
    assert stages.num_attempts == 5


async def test_a_request_that_loses_objects_again_and_again_is_given_up(perform: Callable[[Stages], Any]) -> None:
    stages = Stages([STEP, LOST])
    with pytest.raises(ModelUnavailableError, match=f"lost {MAX_LOSSES} times"):
        await perform(stages)
    assert stages.num_attempts == MAX_LOSSES


@pytest.mark.parametrize("failure", [LOST, DIED, RuntimeError("out of memory")])
async def test_a_preview_that_fails_costs_a_preview(events_of: Callable[..., Any], failure: Exception) -> None:
    stages = Stages([STEP, FIRST, STEP, SECOND, STEP, DONE])
    stages.bad_previews.append(failure)
    stages.previews_may_go_on.set()
    events = await events_of(stages)
    assert [(one.index, one.step) for one in events if isinstance(one, Preview)] == [(0, 2)]
    assert isinstance(events[-1], Media)
    assert stages.num_attempts == 1


async def test_a_decoder_that_dies_costs_a_decoding(perform: Callable[[Stages], Any]) -> None:
    stages = Stages([STEP, DONE])
    stages.bad_decodings.append(DIED)
    assert isinstance(await perform(stages), Media)
    assert (stages.num_attempts, stages.num_decodings) == (1, 2)


@pytest.mark.parametrize("stage", ["encoder", "denoiser", "decoder"])
async def test_a_request_waits_for_a_replica_for_a_time(stage: str) -> None:
    stages = Stages([STEP, DONE], absent=stage)
    events = service_of(stages, m=0.05).perform(PICTURES.request(model="m", prompt="a"), Output(format="png"))
    with pytest.raises(ModelUnavailableError, match=rf"no (text )?{stage} took this request within 0 s"):
        async with asyncio.timeout(PATIENCE_S):
            [event async for event in events]
    assert stages.answers[-1].was_cancelled, "nothing is left waiting"


async def test_the_time_of_the_encoding_is_the_encoders(perform: Callable[[Stages], Any]) -> None:
    assert (await perform(Stages([STEP, DONE]))).timings.encode_s == 0.5


async def test_pictures_go_to_the_encoder_alone() -> None:
    """Each attempt sends them: the first encoder's output may be lost."""
    stages = Stages([STEP, LOST], [STEP, DONE])
    request = EDITS.request(model="m", num_pictures=1)
    inputs = InputPictures(pictures=(InputPicture.of(noise(8, 8)),))
    encoded = []
    async for _ in service_of(stages).perform(request, Output(format="png"), inputs):
        encoded += [sent] if (sent := stages.sent.pop("encode", None)) else []
    assert len(encoded) == stages.num_attempts == 2
    for sent_request, pictures in encoded:
        assert isinstance(pictures, SentPictures)
        assert (sent_request, pictures.open()) == (request, inputs)
    assert set(stages.sent) == {"expected_s", "denoise", "decode"}
    for args in stages.sent.values():
        assert not any(isinstance(one, InputPictures | SentPictures | SentMedia) for one in args)


async def test_what_cannot_be_decoded_is_not_painted(events_of: Callable[..., Any]) -> None:
    stages = Stages([STEP, DONE])
    stages.bad_size = ValueError("takes 99.0 GiB at least")
    with pytest.raises(ValueError, match=r"99\.0 GiB"):
        await events_of(stages)
    assert stages.num_attempts == 0
    assert [answer.was_cancelled for answer in stages.answers] == [True, True], "the encoding, and the question"


async def test_the_decoder_is_asked_about_new_sizes_alone() -> None:
    stages = Stages([STEP, DONE])
    service = service_of(stages)
    for width in (64, 64, 32):
        request = replace(PICTURES.request(model="m", prompt="a red circle"), width=width)
        async with asyncio.timeout(PATIENCE_S):
            events = [event async for event in service.perform(request, Output(format="png"))]
        assert isinstance(events[-1], Media)
    assert [request.width for request, _ in stages.all_sent["expected_s"]] == [64, 32]


class SetGangs:
    """Gangs with set answers; a single call gets the next one."""

    def __init__(self, *answers: object, following: Exception | None = None) -> None:
        self.answers, self.following = answers, following
        self.calls: list[str] = []
        self.load_lora = SimpleNamespace(remote=self._next)

    def broadcast(self, method: str, *arguments: object) -> SimpleNamespace:
        async def results_async(*, timeout_s: float, return_exceptions: bool) -> list[object]:
            assert return_exceptions
            if not self.answers:
                deployment: Any = "denoiser"
                raise DeploymentUnavailableError(deployment)
            return list(self.answers)

        self.calls.append(method)
        return SimpleNamespace(results_async=results_async)

    async def _next(self, lora: Lora) -> Exception | None:
        self.calls.append("next")
        if self.following is None or isinstance(self.following, ValueError):
            return self.following
        raise self.following


WRONG = ValueError("the adapter 'ink' is for another model")


@pytest.mark.parametrize(
    ("gangs", "calls", "error"),
    [
        (SetGangs(None, None), ["load_lora"], None),
        (SetGangs(None, BROKEN), ["load_lora"], None),
        (SetGangs(None, WRONG), ["load_lora"], ValueError),
        (SetGangs(None, RuntimeError("?")), ["load_lora"], RuntimeError),
        (SetGangs(), ["load_lora", "next"], None),
        (SetGangs(following=WRONG), ["load_lora", "next"], ValueError),
        (SetGangs(BROKEN), ["load_lora", "next"], None),
        (SetGangs(BROKEN, following=BROKEN), ["load_lora", "next"], ModelUnavailableError),
    ],
)
async def test_an_adapter_is_loaded_on_all_gangs_or_the_next_one(
    gangs: SetGangs, calls: list[str], error: type[Exception] | None
) -> None:
    """A gang that breaks loads it later; an adapter that breaks gangs breaks no third one."""
    stages: Any = {"m": SimpleNamespace(denoiser=gangs)}
    service = DeployedService({}, stages, Readiness({}))
    with nullcontext() if error is None else pytest.raises(error):
        await service.load_lora("m", Lora(name="ink", folder="/a/lora_1"))
    assert gangs.calls == calls
    await service.remove_lora("m", Lora(name="ink", folder="/a/lora_1"))
    assert gangs.calls == [*calls, "remove_lora"]


@pytest.mark.parametrize(
    ("answers", "forwards"),
    [
        (("compiled", "compiled"), "compiled"),
        (("compiled", "eager"), "eager"),
        (("compiled", BROKEN), "compiled"),
        ((), None),
    ],
)
async def test_a_card_has_what_gangs_say_of_their_forwards(answers: tuple[object, ...], forwards: str | None) -> None:
    """Only gangs of a compiled whole pipeline are queried."""
    gangs, blocks = SetGangs(*answers), SetGangs("eager")
    paths: dict[str, ModelPath] = {"whole": WHOLE, "blocks": "blocks"}
    cards = {
        name: ModelCard(name=name, family="m", created=0, defaults=PICTURES, path=path) for name, path in paths.items()
    }
    stages: Any = {"whole": SimpleNamespace(denoiser=gangs), "blocks": SimpleNamespace(denoiser=blocks)}
    service = DeployedService(cards, stages, Readiness({}))
    await service.look()
    assert {name: card.forwards for name, card in service.cards().items()} == {"whole": forwards, "blocks": None}
    assert (gangs.calls, blocks.calls) == (["forwards"], [])
