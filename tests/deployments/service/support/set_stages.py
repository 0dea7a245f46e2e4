"""Three simulated deployments, without Ray."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from deployments.stages.common import Decoded, EncodingDone
from engines.gang.errors import GangBrokenError, QueueFullError
from engines.gang.jobs.job import JobEvent

Act = JobEvent | Exception | float | asyncio.Event
"""One act of an attempt: an event, the error it ends with, seconds that pass, or an event to wait for."""


class Answer:
    """The result of calling a deployment. ``taken`` is set once a replica has it, and then ``answer`` runs."""

    def __init__(self, answer: Callable[[], Awaitable[Any]], taken: asyncio.Event | None = None) -> None:
        self._answer, self._taken, self.was_cancelled = answer, taken, False

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._answer().__await__()

    async def _to_object_ref(self) -> None:
        if self._taken is not None:
            await self._taken.wait()

    def cancel(self) -> None:
        self.was_cancelled = True


class Stream(Answer):
    def __init__(
        self, groups: AsyncGenerator[tuple[Any, ...]], taken: asyncio.Event | None, wait: Callable[[], None]
    ) -> None:
        super().__init__(asyncio.Event().wait, taken)
        self._groups, self._wait = groups, wait

    def __aiter__(self) -> AsyncGenerator[tuple[Any, ...]]:
        return self._groups

    async def _to_object_ref_gen(self) -> None:
        await self._to_object_ref()
        self._wait()


class Stages:
    """The three deployments of a model. The gang of each attempt acts as in ``attempts``; the last one repeats.

    The first previews or decodings fail with the errors of ``bad_previews`` and ``bad_decodings``, one each. The stage
    ``absent`` has no replica. With a ``bad_size`` sizes are too large for the decoder; else it predicts ``expected_s``
    for decoding. A ValueError is an answer, not raised. A gang takes each request after ``taken_after_s``. For the time
    of an abandoned job gangs return ``spent_s``, or raise it; ``asked`` are these jobs.
    """

    def __init__(self, *attempts: list[Act], absent: str = "") -> None:
        self._attempts = attempts
        self.num_attempts, self.num_decodings, self.now_s = 0, 0, 1000.0
        self.bad_previews: list[Exception] = []
        self.bad_decodings: list[Exception] = []
        self.decoded = Decoded(data=b"png", thumbnail=b"", decode_s=0.1)
        self.expected_s: float | None = None
        self.bad_size: Exception | None = None
        self.taken_after_s = 0.0
        self.answers: list[Answer] = []
        never = asyncio.Event()
        self._taken = {stage: never if stage == absent else None for stage in ("encoder", "denoiser", "decoder")}
        self.sent: dict[str, tuple[object, ...]] = {}
        """The last arguments of each method."""
        self.all_sent: defaultdict[str, list[tuple[Any, ...]]] = defaultdict(list)
        """The arguments of each call."""
        self.text_encoder = SimpleNamespace(encode=self._remote("encode", lambda: self._answer("encoder", never.wait)))
        self.spent_s: list[Any] | Exception = []
        self.asked: list[str] = []
        self.denoiser = SimpleNamespace(
            options=lambda **_: SimpleNamespace(denoise=self._remote("denoise", self._denoise)),
            broadcast=lambda method, job_id: SimpleNamespace(results_async=partial(self._told, method, job_id)),
        )
        self.decoder = SimpleNamespace(
            decode=self._remote("decode", lambda: self._answer("decoder", self._decode)),
            expected_s=self._remote("expected_s", lambda: self._answer("decoder", self._expected_s)),
            preview=remote(lambda latents, _: self._answer("decoder", partial(self._preview, latents))),
        )
        self.previews_may_go_on = asyncio.Event()

    def set_clock_of(self, *modules: ModuleType, patch: pytest.MonkeyPatch) -> None:
        """Let time pass in ``modules`` only where an attempt says so."""
        for module in modules:
            clock = SimpleNamespace(monotonic=lambda: self.now_s, perf_counter=lambda: self.now_s)
            patch.setattr(module, "time", clock)

    def _remote(self, method: str, answer: Callable[[], Any]) -> SimpleNamespace:
        def call(*args: object) -> Any:
            self.sent[method] = args
            self.all_sent[method].append(args)
            return answer()

        return remote(call)

    def _answer(self, stage: str, answer: Callable[[], Awaitable[Any]]) -> Answer:
        self.answers.append(Answer(answer, self._taken[stage]))
        return self.answers[-1]

    async def _decode(self) -> Decoded:
        self.num_decodings += 1
        if self.bad_decodings:
            raise self.bad_decodings.pop(0)
        return self.decoded

    async def _expected_s(self) -> float | Exception | None:
        return self.bad_size or self.expected_s

    async def _preview(self, latents: Any) -> bytes:
        await self.previews_may_go_on.wait()
        if self.bad_previews:
            raise self.bad_previews.pop(0)
        return f"preview of {latents}".encode()

    def _denoise(self) -> Any:
        acts = self._attempts[min(self.num_attempts, len(self._attempts) - 1)]
        self.num_attempts += 1
        self.answers.append(Stream(self._run(acts), self._taken["denoiser"], self._pass))
        return self.answers[-1]

    def _pass(self) -> None:
        self.now_s += self.taken_after_s

    async def _told(self, method: str, job_id: str, *, timeout_s: float, return_exceptions: bool) -> list[Any]:
        assert (method, return_exceptions) == ("spent_s", True)
        self.asked.append(job_id)
        if isinstance(self.spent_s, list):
            return self.spent_s
        raise self.spent_s

    async def _run(self, acts: list[Act]) -> AsyncGenerator[tuple[Any, ...]]:
        first: tuple[Any, ...] = (EncodingDone(encode_s=0.5),)
        for act in acts:
            if isinstance(act, QueueFullError | GangBrokenError | ValueError):
                yield (act,)
            elif isinstance(act, Exception):
                raise act
            elif isinstance(act, float):
                self.now_s += act
            elif isinstance(act, asyncio.Event):
                await act.wait()
            else:
                yield (*first, act)
                first = ()


def remote(function: Callable[..., Any]) -> SimpleNamespace:
    return SimpleNamespace(remote=function)
