"""Time at which the application is expected back, by the length of its last outage."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

RUNNING, PASSED = "2", "3"
"""``srv_op_state`` and ``srv_check_result`` of HAProxy's Management Guide, section 9.3."""
STOPPED = "0"


class Outages:
    """Outages of the application, of which its start is the first; that is expected to take ``start_s``.

    ``date`` gives Unix time, as HAProxy's ``date`` does. It may jump, so durations are those of ``clock``.
    """

    def __init__(
        self, start_s: float, date: Callable[[], float] = time.time, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._date, self._clock = date, clock
        self._expected_s, self._back_s = start_s, math.ceil(date() + start_s)
        self._since_s: float | None = clock()

    @property
    def back_s(self) -> int:
        """Unix time at which the application is expected; 0 while it is there."""
        return 0 if self._since_s is None else self._back_s

    def note(self, is_there: bool) -> bool:
        """Record whether the application is there. Return whether that changed."""
        now_s = self._clock()
        if is_there and self._since_s is not None:
            self._expected_s, self._since_s = now_s - self._since_s, None
            return True
        if not is_there and self._since_s is None:
            self._since_s, self._back_s = now_s, math.ceil(self._date() + self._expected_s)
            return True
        return False


def server_state(answer: str) -> bool | None:
    """Return whether a server is up, by ``show servers state``; None while its health checks do not tell yet."""
    lines = [line.split() for line in answer.splitlines()]
    head = next((line[1:] for line in lines if line[:2] == ["#", "be_id"]), [])
    row = next(
        (dict(zip(head, line, strict=False)) for line in lines if line and line[0].isdigit() and len(line) > 1), {}
    )
    if row.get("srv_op_state") == RUNNING and row.get("srv_check_result") == PASSED:
        return True
    return False if row.get("srv_op_state") == STOPPED else None
