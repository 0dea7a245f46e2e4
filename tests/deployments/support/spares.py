"""Processes that stand by."""

from __future__ import annotations

import psutil


def is_idle(process: psutil.Process) -> bool:
    """Whether Ray's node manager holds it among its idle workers: it has started, and was not given away."""
    try:
        return process.cmdline()[:1] == ["ray::IDLE"]
    except psutil.Error:  # it has just ended
        return False
