"""What can go wrong with a gang, as exceptions that survive pickling across actors."""

from __future__ import annotations


class GangBrokenError(RuntimeError):
    """A rank died, hung past the step deadline, or gave a wrong answer; every job of the gang must be run again."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class QueueFullError(RuntimeError):
    """The gang has as many waiting jobs as it may hold. ``retry_after_s`` is an estimate."""

    def __init__(self, num_waiting: int, retry_after_s: float) -> None:
        super().__init__(num_waiting, retry_after_s)
        self.num_waiting = num_waiting
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"{self.num_waiting} jobs are waiting already; try again in about {self.retry_after_s:.0f} s"
