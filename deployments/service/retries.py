"""Retries of a failed request, and its wait for a replica that is being rebuilt."""

from __future__ import annotations

import logging
import math
import time

from ray import exceptions as ray_errors

from deployments.observability.metrics import REQUEST_FAILURES
from deployments.service.interface import ModelUnavailableError
from deployments.service.readiness import Readiness
from engines.gang.errors import DEADLINE, GangBrokenError, QueueFullError, TooLateError
from pipelines.request import MediaRequest

MAX_BROKEN_GANGS = 2
MAX_LOSSES = 4
"""Objects that a request may lose on the way between deployments. A dead node explains a few, not more."""
RECOVERY_DEADLINE_S = 180.0
"""Time from the loss of the gang, or the first loss, until a step of the request must have run again.

It is also the limit for each deployment until a replica has taken the request."""
MIN_WAIT_S = 10.0
"""A replica that is there takes a request within this, however busy its machine is."""
HELD_S = 2.0
"""A request that waited for a replica longer than this counts as accepted and is not refused later."""
RETRYABLE = (GangBrokenError, ray_errors.RayActorError, ray_errors.ObjectLostError)

logger = logging.getLogger("troupe.flow")


class Retries:
    """Errors of one request so far.

    It waits ``max_wait_s`` for its first replica, by default ``patience_s``. ``accepted``: it was admitted to wait for
    a gang, since none was there.
    """

    def __init__(
        self,
        request: MediaRequest,
        readiness: Readiness,
        patience_s: float = RECOVERY_DEADLINE_S,
        max_wait_s: float | None = None,
        *,
        accepted: bool = False,
    ) -> None:
        self._request, self._readiness, self._patience_s = request, readiness, patience_s
        self._max_wait_s = min(patience_s, math.inf if max_wait_s is None else max(max_wait_s, MIN_WAIT_S))
        self._is_accepted = accepted
        self._came_s = time.monotonic()
        self._give_up_s: float | None = None
        self._num_broken = self._num_lost = 0

    @property
    def exclusive(self) -> bool:
        """True if it runs alone: each job of a broken gang shows this way whether it was the cause."""
        return self._num_broken > 0

    @property
    def accepted(self) -> bool:
        """True if no gang may refuse it for a full queue: it waited for a gang, or lost one that had taken it."""
        return self._is_accepted or self._give_up_s is not None

    @property
    def waited_s(self) -> float:
        """Seconds since it came."""
        return time.monotonic() - self._came_s

    @property
    def wait_s(self) -> float:
        """Seconds that it may wait for a replica from now on."""
        if self._give_up_s is None:
            return self._max_wait_s
        return max(0.0, min(self._patience_s, self._give_up_s - time.monotonic()))

    def after_refusal(self, refusal: QueueFullError, held_s: float = 0.0) -> None:
        """Raise ``refusal``, unless the request counts as accepted: then the next gang must take it.

        It counts if it was accepted before or held long enough. A missed deadline is always raised.
        """
        is_final = isinstance(refusal, TooLateError) and refusal.limit == DEADLINE
        self._is_accepted = self.accepted or held_s > HELD_S
        if is_final or not self._is_accepted or time.monotonic() > (self._give_up_s or math.inf):
            raise refusal

    def after(self, error: Exception, num_steps_seen: int) -> None:
        """Record an error of RETRYABLE. Raise the request's final error unless it is retried."""
        if self._give_up_s is None or num_steps_seen:  # however long it ran: recovery begins now
            self._give_up_s = time.monotonic() + self._patience_s
        REQUEST_FAILURES.labels(self._request.model, type(error).__name__).inc()
        if isinstance(error, ray_errors.ObjectLostError):
            self._after_loss(error)
        else:
            self._after_broken_gang(error, num_steps_seen)
        if time.monotonic() > self._give_up_s:
            raise self._unavailable(f"no gang ran this request within {self._patience_s:g} s; the last: {error}")

    def _after_loss(self, error: Exception) -> None:
        self._num_lost += 1
        logger.warning("request %s lost an object: %s", self._request.request_id, error)
        if self._num_lost >= MAX_LOSSES:
            raise self._unavailable(f"objects of this request were lost {self._num_lost} times") from error

    def _after_broken_gang(self, error: Exception, num_steps_seen: int) -> None:
        self._num_broken += _counts(error, num_steps_seen)
        self._readiness.gang_lost()
        logger.warning("request %s lost its gang (%s): %s", self._request.request_id, self._num_broken, error)
        if self._num_broken >= MAX_BROKEN_GANGS:
            raise GangBrokenError(f"given up after {self._num_broken} broken gangs; the last: {error}") from error

    def _unavailable(self, reason: str) -> ModelUnavailableError:
        model = self._request.model
        return ModelUnavailableError(f"{model}: {reason}", self._readiness.retry_after_s(model))


def _counts(error: Exception, num_steps_seen: int) -> bool:
    """Return whether a lost gang counts against the request: it ran there, and neither gang nor node was taken away."""
    if isinstance(error, GangBrokenError):
        return error.in_flight and error.cause != "closed"
    return num_steps_seen > 0 and not (isinstance(error, ray_errors.RayActorError) and error.preempted)
