"""The time that claims go by."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What claims, and who deletes old clips, think the time is, in ``now_s``."""
    clock = SimpleNamespace(now_s=time.time())
    for module in ("store", "clips"):
        monkeypatch.setattr(f"deployments.clips.{module}.time", SimpleNamespace(time=lambda: clock.now_s))
    return clock
