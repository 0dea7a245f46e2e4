"""Limits on what is under way at once. A request beyond a limit is refused before any work is done for it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.http.errors import ApiError
from deployments.http.settings import ApiSettings
from deployments.names import FULL_HEADER
from pipelines.wording import counted

ALWAYS_ANSWERED = "/health"
WATCHER_RETRY_S = 10
FULL_RETRY_S = 5
FIRST_GUESS_S = 1.0
"""Between two finished pictures, while none is finished yet."""
SMOOTHING = 0.2
"""Weight of the newest of the times between two finished pictures."""


class Admission:
    """Places for pictures, by model, and for watchers of clips; ``memory`` for uploaded pictures and clips.

    The limit on pictures is slightly above what the gangs of a model take. A request that a gang would refuse after
    encoding is refused here. If no model has a place left, the refusal tells the door.
    """

    def __init__(self, settings: ApiSettings) -> None:
        self._settings = settings
        self._pictures = {model: Places(limit) for model, limit in settings.max_open_pictures.items()}
        self._num_watchers = 0
        self.memory = Memory(settings.max_open_upload_bytes)

    @contextmanager
    def taken(self, model: str, num: int, num_bytes: int = 0, gang_in_s: float = 0.0) -> Iterator[None]:
        """Hold places for ``num`` pictures, and memory for ``num_bytes`` of uploads, inside the block.

        ApiError 429 if fewer places are free, 503 without memory. ``gang_in_s``: seconds to a ready gang; no place
        becomes free before.
        """
        with ExitStack() as stack:
            if model in self._pictures:
                with self._report_full_to_door(gang_in_s):
                    stack.enter_context(self._pictures[model].taken(num, gang_in_s))
            stack.enter_context(self.memory.taken())(num_bytes)
            yield

    def check_place(self, model: str, gang_in_s: float = 0.0) -> None:
        """Raise ApiError 429 if there is no place for a picture, before costly work such as decoding uploads."""
        if model in self._pictures:
            with self._report_full_to_door(gang_in_s):
                self._pictures[model].check(1, gang_in_s)

    @contextmanager
    def _report_full_to_door(self, gang_in_s: float) -> Iterator[None]:
        try:
            yield
        except ApiError as refusal:
            if self._settings.is_only_replica and all(places.is_full for places in self._pictures.values()):
                empty_s = max(places.until_empty_s for places in self._pictures.values())
                refusal.headers[FULL_HEADER] = str(empty_s + math.ceil(gang_in_s))
            raise

    @contextmanager
    def watcher(self) -> Iterator[None]:
        """Hold a place for one stream of a clip's events inside the block. ApiError 429 if there is none."""
        limit = self._settings.max_watchers
        if self._num_watchers >= limit:
            streams = counted(limit, "stream", "streams")
            message = f"{streams} of events may be open, and no more; ask GET /v1/videos/{{video_id}} for the progress"
            raise ApiError(429, message, code="too_many_watchers", headers={"Retry-After": str(WATCHER_RETRY_S)})
        self._num_watchers += 1
        try:
            yield
        finally:
            self._num_watchers -= 1


class Places:
    """Room for ``limit`` pictures of one model, and how often a place becomes free. ``clock`` gives seconds."""

    def __init__(self, limit: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._num_open = 0
        self._num_refused = 0
        self._interval_s: float | None = None
        self._last_s = -math.inf

    @property
    def is_full(self) -> bool:
        return self._num_open >= self._limit

    @property
    def until_empty_s(self) -> int:
        """Whole seconds, 1 at least, until all that is under way will be finished."""
        return self._wait_s(self._num_open)

    @contextmanager
    def taken(self, num: int, gang_in_s: float = 0.0) -> Iterator[None]:
        """Reserve ``num`` places inside the block. ApiError 429 if fewer are free.

        No place is freed for ``gang_in_s``. With nothing running, a request is admitted whatever ``num`` is.
        """
        self.check(num, gang_in_s)
        if not self._num_open:
            self._last_s = self._clock()
        self._num_open += num
        try:
            yield
            self._learn(num)
        finally:
            self._num_open -= num
            self._num_refused = max(0, self._num_refused - num)

    def check(self, num: int, gang_in_s: float = 0.0) -> None:
        """Raise ApiError 429 if fewer than ``num`` places are free."""
        if self._num_open and self._num_open + num > self._limit:
            raise self._refusal(num, gang_in_s)

    def _learn(self, num: int) -> None:
        """Count ``num`` finished pictures. At least one has been running since ``_last_s``."""
        now_s = self._clock()
        interval_s = (now_s - self._last_s) / num
        before_s = interval_s if self._interval_s is None else self._interval_s
        self._interval_s = before_s + SMOOTHING * (interval_s - before_s)
        self._last_s = now_s

    def _refusal(self, num: int, gang_in_s: float) -> ApiError:
        """Return the refusal of ``num`` pictures, with the time until a retry.

        The wait assumes that earlier refused requests retry first. It is capped at the time to finish all open
        pictures.
        """
        self._num_refused += num
        wait_s = self._wait_s(min(self._num_refused, self._num_open)) + math.ceil(gang_in_s)
        pictures = counted(self._num_open, "picture is", "pictures are")
        message = f"{pictures} being made or waiting; try again in about {wait_s} s"
        return ApiError(429, message, code="queue_full", headers={"Retry-After": str(wait_s)})

    def _wait_s(self, num: int) -> int:
        return max(1, math.ceil(num * (self._interval_s or FIRST_GUESS_S)))


class Memory:
    """Room for ``limit`` bytes of input pictures, as they were sent and unpacked."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num_bytes = 0

    @contextmanager
    def taken(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that reserves more bytes until the end of the block. ApiError 503 if too few are free.

        With nothing reserved, one request is admitted whatever its size is.
        """
        num_own = 0

        def take(num_bytes: int) -> None:
            nonlocal num_own
            num_others = self._num_bytes - num_own
            if num_bytes and num_others and self._num_bytes + num_bytes > self._limit:
                message = f"Too many pictures are being sent here already; try again in about {FULL_RETRY_S} s"
                raise ApiError(503, message, code="server_full", headers={"Retry-After": str(FULL_RETRY_S)})
            self._num_bytes += num_bytes
            num_own += num_bytes

        try:
            yield take
        finally:
            self._num_bytes -= num_own


class OpenRequests:
    """Refuses requests with 503 while ``limit`` are under way. GET /health is answered whatever there is."""

    def __init__(self, app: ASGIApp, *, limit: int) -> None:
        self.app = app
        self.limit = limit
        self.num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == ALWAYS_ANSWERED:
            await self.app(scope, receive, send)
            return
        if self.num_open >= self.limit:
            requests = counted(self.limit, "request is", "requests are")
            message = f"{requests} under way already; try again in about {FULL_RETRY_S} s"
            error = ApiError(503, message, code="server_full", headers={"Retry-After": str(FULL_RETRY_S)})
            await error.response()(scope, receive, send)
            return
        self.num_open += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.num_open -= 1
