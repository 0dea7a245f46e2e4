"""The clock of a gang: current time and timeouts."""

from __future__ import annotations

import asyncio
import time


class Clock:
    """The monotonic clock. All timing of a gang goes through it, so that tests can replace it."""

    def now_s(self) -> float:
        """Return the seconds since a fixed moment."""
        return time.monotonic()

    def timeout(self, delay_s: float | None) -> asyncio.Timeout:
        """Return a context that raises TimeoutError after ``delay_s``; None: never."""
        return asyncio.timeout(delay_s)
