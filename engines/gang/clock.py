"""What time it is in a gang, and what has lasted too long."""

from __future__ import annotations

import asyncio
import time


class Clock:
    """The real one. All that a gang does after a time it does by its clock, so a test can set when that is."""

    def now_s(self) -> float:
        """Seconds since a moment that stays the same."""
        return time.monotonic()

    def timeout(self, delay_s: float | None) -> asyncio.Timeout:
        """A context that raises TimeoutError if it lasts longer than ``delay_s``; None: never."""
        return asyncio.timeout(delay_s)
