"""What other processes say of themselves, for tests that look for one of them."""

from __future__ import annotations

import psutil


def cmdline(process: psutil.Process) -> list[str]:
    """The words of its command line; none for a process that has ended, or is about to."""
    try:
        words: list[str] = process.cmdline()
    except psutil.Error:
        return []
    return words
