"""What can go wrong with durable jobs."""

from __future__ import annotations


class TooManyJobsError(RuntimeError):
    """As many jobs wait as may. ``retry_after_s`` is an estimate."""

    def __init__(self, num_waiting: int, retry_after_s: float) -> None:
        super().__init__(num_waiting, retry_after_s)
        self.num_waiting = num_waiting
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"{self.num_waiting} jobs are waiting already; try again in about {self.retry_after_s:.0f} s"
