"""The clock of claims, and the databases of clips."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from tests.deployments.clips.support.runs import QUICK


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Set the time for claims and for the deletion of old clips, in ``now_s``."""
    clock = SimpleNamespace(now_s=time.time())
    for module in ("store", "clips"):
        monkeypatch.setattr(f"deployments.clips.{module}.time", SimpleNamespace(time=lambda: clock.now_s))
    return clock


@pytest.fixture
def each_database(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test's clips on a database of each kind."""
    monkeypatch.setitem(QUICK, "database_url", database_url)
