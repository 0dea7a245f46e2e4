"""Exceptions of a gang, which survive pickling across actors."""

from __future__ import annotations

import pickle
from typing import Literal

BreakCause = Literal["death", "deadline", "error", "closed"]


class GangBrokenError(RuntimeError):
    """A rank died, hung past the step deadline, or gave a wrong answer; every job of the gang must be run again.

    ``in_flight``: this job had a step in flight when the gang broke. Only such a job can be the cause. ``replica``: the
    name of the replica whose gang it was, which takes no more jobs; empty if unknown.
    """

    replica = ""

    def __init__(self, reason: str, cause: BreakCause = "error", in_flight: bool = False) -> None:
        super().__init__(reason, cause, in_flight)
        self.reason = reason
        self.cause: BreakCause = cause
        self.in_flight = in_flight

    def __str__(self) -> str:
        return self.reason


class QueueFullError(RuntimeError):
    """The queue holds as many jobs as it may. ``retry_after_s`` is an estimate."""

    def __init__(self, num_waiting: int, retry_after_s: float) -> None:
        super().__init__(num_waiting, retry_after_s)
        self.num_waiting = num_waiting
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        jobs = "1 job is" if self.num_waiting == 1 else f"{self.num_waiting} jobs are"
        return f"{jobs} waiting already; try again in about {self.retry_after_s:.0f} s"


DEADLINE = "deadline_s"
"""The limit that a request sets itself."""


class TooLateError(QueueFullError):
    """The job is predicted to miss ``limit`` (DEADLINE or the longest wait), which is ``limit_s`` seconds.

    ``retry_after_s`` is the time until it would be admitted, without other arrivals.
    """

    def __init__(self, num_waiting: int, retry_after_s: float, predicted_s: float, limit: str, limit_s: float) -> None:
        super().__init__(num_waiting, retry_after_s)
        self.args = (num_waiting, retry_after_s, predicted_s, limit, limit_s)
        self.predicted_s, self.limit, self.limit_s = predicted_s, limit, limit_s

    def __str__(self) -> str:
        return (
            f"it would take about {self.predicted_s:.1f} s, and {self.limit} is {self.limit_s:g}; "
            f"try again in about {self.retry_after_s:.0f} s"
        )


def portable(error: Exception) -> Exception:
    """Return ``error`` if it survives pickling, else a RuntimeError with its type and text."""
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:
        pass
    return RuntimeError(f"{type(error).__name__}: {error}")
