"""One run of a request through the Serve deployments: encode, denoise, decode."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.handle import DeploymentHandle

from deployments.asyncio_tools import cancel, produced
from deployments.observability.metrics import ENCODINGS, STAGE_SECONDS
from deployments.ray_private import object_ref, object_ref_generator
from deployments.service.interface import (
    Media,
    ModelUnavailableError,
    Output,
    Preview,
    Queued,
    ServiceEvent,
    StageTimes,
)
from deployments.stages.common import Decoded, EncodingDone, SentPictures, StageEvent
from deployments.stages.measured_times import DecodeKey, DecodeTimes, decode_key
from engines.gang.jobs.job import JobDone, JobQueued, PreviewReady, Progress
from pipelines.request import InputPictures, MediaRequest

NUM_DECODINGS = 2
"""Attempts at decoding. The latents are kept here, so that a second decoder can take over."""

Publish = Callable[[ServiceEvent], None]

logger = logging.getLogger("troupe.flow")


@dataclass(frozen=True, kw_only=True, slots=True)
class StageHandles:
    """The three deployments of one model."""

    text_encoder: DeploymentHandle[Any]
    """Encodes prompts and pictures."""
    denoiser: DeploymentHandle[Any]
    """Has a gang in each replica."""
    decoder: DeploymentHandle[Any]
    """Decodes latents and previews."""


@dataclass(kw_only=True, slots=True)
class Run:
    """One run of a request through the stages."""

    stages: StageHandles
    """The model's deployments."""
    request: MediaRequest
    """Request for the media."""
    output: Output
    """Format of the file."""
    pictures: InputPictures
    """Pictures for the encoder alone."""
    exclusive: bool
    """It runs alone in its gang."""
    wait_s: float
    """Seconds that each deployment has to take the request."""
    accepted: bool = False
    """It was admitted before: full queues must take it."""
    waited_s: float = 0.0
    """Seconds that it has waited already, in earlier runs."""
    decode_times: DecodeTimes = field(default_factory=DecodeTimes)
    """Measured, transport included; the decoder is asked for keys that they lack."""
    num_steps_seen: int = field(default=0, init=False)
    """Steps that were reported to this run."""
    job_id: str = field(default="", init=False)
    """Its id in the gang; empty until a gang has it."""
    gpu_s: float = field(default=0.0, init=False)
    """Rank time used for it, as far as known."""
    held_s: float = field(default=0.0, init=False)
    """Time spent waiting for replicas."""
    is_finished: bool = field(default=False, init=False)
    """The picture or clip was published."""
    _started_s: float = field(default_factory=lambda: time.perf_counter(), init=False)
    """Begin of this run, by ``time.perf_counter``."""
    _previews: asyncio.Queue[PreviewReady | None] = field(default_factory=asyncio.Queue, init=False)
    """Latents to decode in this order; None after the last."""
    _encode_s: float = field(default=0.0, init=False)
    """Time in the encoder; 0 until it is known."""
    _queued_at_s: float = field(default=0.0, init=False)
    """Seconds from its arrival until the gang admitted it."""
    _decoder_estimate_s: float | None = field(default=None, init=False)
    """Decode time by the decoder's own estimate."""
    _eta_s: float | None = field(default=None, init=False)
    """Predicted end, since it came; None without a prediction."""
    _done: JobDone | None = field(default=None, init=False)
    """The end of its steps; None before."""
    _decoding: asyncio.Task[Decoded] | None = field(default=None, init=False)
    """Decodes the latents, once they are there."""

    def events(self) -> AsyncGenerator[ServiceEvent]:
        """Yield progress and previews, ``Media`` last. They do not wait for each other.

        Raise what a deployment raised, ModelUnavailableError if none took the request in time.
        """
        return produced(self._perform)

    async def _perform(self, publish: Publish) -> None:
        previews = asyncio.create_task(self._decode_previews(publish))
        try:
            await self._denoise(publish)
            self._previews.put_nowait(None)
            await previews
            assert self._done is not None, "the gang ended a job without JobDone"
            assert self._decoding is not None
            publish(self._finished(self._done, await self._decoding))
        finally:
            await cancel(previews, *([] if self._decoding is None else [self._decoding]))

    def _finished(self, done: JobDone, decoded: Decoded) -> Media:
        """Return what is decoded, and learn from its times."""
        timings = self._timings(done, decoded)
        rest_s = timings.total_s - self._queued_at_s - timings.queue_s - timings.denoise_s
        self.decode_times.learn(self._decoded_like, max(decoded.decode_s, rest_s))
        for stage in ("queue", "encode", "denoise", "decode", "total"):
            STAGE_SECONDS.labels(stage, self.request.model).observe(getattr(timings, f"{stage}_s"))
        return Media(
            data=decoded.data,
            format=self.output.format,
            seed=self.request.seed,
            timings=timings,
            thumbnail=decoded.thumbnail,
            further=decoded.further,
            revised_prompt=self.request.revised_prompt,
        )

    async def _denoise(self, publish: Publish) -> None:
        """Follow the denoiser's stream to its end. If this is cancelled, so is the stream: the job stops everywhere.

        The denoiser gets a reference to the encoding and waits for it, so that the transfer overlaps. Errors of the
        encoder are raised here. The reference is held until the end, so that the encoding is not freed. For a new size,
        the decoder predicts its time and checks that the size fits, while the encoder runs.
        """
        responses: list[Any] = [self.stages.text_encoder.encode.remote(self.request, SentPictures.of(self.pictures))]
        if is_new := self.decode_times.get(self._decoded_like) is None:
            responses.append(self.stages.decoder.expected_s.remote(self.request, self.output))
        try:
            encoded = [await self._await_replica(object_ref(responses[0]), "text encoder")]
            if is_new:
                self._decoder_estimate_s = await self._answer(responses[1])
            denoise = self.stages.denoiser.options(stream=True).denoise
            self.job_id = f"{self.request.request_id}-{uuid.uuid4().hex[:8]}"
            request, decode_s = self._with_time_waited(), self._predicted_decode_s or 0.0  # unknown: no refusal
            stream: Any = denoise.remote(self.job_id, request, encoded, self.exclusive, decode_s, self.accepted)
            responses.append(stream)
            await self._await_replica(object_ref_generator(stream), "denoiser")
            async for group in stream:
                for event in group:
                    self._hear(event, publish)
        except BaseException:
            for response in responses:
                response.cancel()
            raise

    def _hear(self, event: StageEvent, publish: Publish) -> None:
        """Take note of an event of the job. The end of its steps begins the decoding."""
        match event:
            case EncodingDone():
                self._encode_s = event.encode_s
                ENCODINGS.labels(self.request.model, "kept" if event.was_kept else "encoded").inc()
            case JobQueued():
                self._queued_at_s, decode_s = self._elapsed_s, self._predicted_decode_s
                if event.eta_s is not None and decode_s is not None:
                    self._eta_s = self._queued_at_s + event.eta_s + decode_s
                publish(Queued(eta_s=self._eta_s, decode_s=decode_s, num_before=event.num_before))
            case Progress():
                self.num_steps_seen += 1
                self.gpu_s = event.gpu_s
                publish(event)
            case PreviewReady():
                self._previews.put_nowait(event)
            case JobDone():
                self._done, self.gpu_s = event, event.gpu_s
                self._decoding = asyncio.create_task(self._decode(event))
            case Exception():
                raise event

    async def _decode_previews(self, publish: Publish) -> None:
        """Decode the job's previews in order. The job does not wait for them, and goes on without one that fails."""
        index = 0
        while ready := await self._previews.get():
            try:
                data = await self._answer(self.stages.decoder.preview.remote(ready.latents, self.request))
            except Exception:
                logger.warning("request %s: a preview failed", self.request.request_id, exc_info=True)
                continue
            publish(Preview(index=index, step=ready.step, data=data))
            index += 1

    async def _decode(self, done: JobDone, num_left: int = NUM_DECODINGS) -> Decoded:
        try:
            response = self.stages.decoder.decode.remote(done.latents, self.request, self._output)
            decoded: Decoded = await self._answer(response)
            return decoded
        except RayActorError as error:
            logger.warning("request %s lost its decoder: %s", self.request.request_id, error)
            if num_left == 1:
                raise
            return await self._decode(done, num_left - 1)

    @property
    def _output(self) -> Output:
        """The form of the file, with the sound of the input clip if the request copies it."""
        video = self.pictures.video if self.request.copies_sound else None
        return self.output if video is None else replace(self.output, sound=video.sound)

    async def _answer(self, response: Any) -> Any:
        try:
            await self._await_replica(object_ref(response), "decoder")
            answer = await response
            if isinstance(answer, Exception):
                raise answer
            return answer
        except BaseException:
            response.cancel()
            raise

    async def _await_replica(self, reference: Awaitable[Any], stage: str) -> Any:
        """Return the reference to the result once a replica has taken the request."""
        asked_s = time.perf_counter()
        try:
            async with asyncio.timeout(self.wait_s):
                return await reference
        except TimeoutError:
            reason = f"no {stage} took this request within {self.wait_s:.0f} s"
            raise ModelUnavailableError(f"{self.request.model}: {reason}") from None
        finally:
            self.held_s += time.perf_counter() - asked_s

    def _timings(self, done: JobDone, decoded: Decoded) -> StageTimes:
        return StageTimes(
            queue_s=done.queue_s,
            encode_s=self._encode_s,
            denoise_s=done.denoise_s,
            decode_s=decoded.decode_s,
            total_s=self._elapsed_s,
            was_warm=done.was_warm,
            gpu_s=done.gpu_s,
            eta_s=self._eta_s,
            same_bytes=done.same_bytes,
        )

    @property
    def is_denoised(self) -> bool:
        """True if ranks have finished their work for it: ``gpu_s`` is final."""
        return self._done is not None

    @property
    def _elapsed_s(self) -> float:
        """Seconds since the request came, including failed runs."""
        return self.waited_s + time.perf_counter() - self._started_s

    @property
    def _decoded_like(self) -> DecodeKey:
        return decode_key(self.request, self.output)

    @property
    def _predicted_decode_s(self) -> float | None:
        word_s = self._decoder_estimate_s
        return self.decode_times.scaled_s(self._decoded_like) if word_s is None else word_s

    def _with_time_waited(self) -> MediaRequest:
        """Return the request with its time so far, with all waits and retries: its deadline counts from arrival."""
        if self.request.deadline_s is None:
            return self.request
        return replace(self.request, waited_s=self.request.waited_s + self._elapsed_s)
