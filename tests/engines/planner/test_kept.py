"""Decisions that cannot be kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.core.spec import ParallelSpec
from engines.parallel.division import TeamSpecs
from engines.planner.kept import Decision, KeptDecision

DECISION = Decision(specs=TeamSpecs(by_size={1: (ParallelSpec(), ParallelSpec())}))


@pytest.mark.parametrize("name", ["taken/tiny", "t" * 300])
def test_a_place_that_takes_no_file_costs_a_line_in_the_log(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As a folder does that others alone may look into."""
    (tmp_path / "taken").touch()
    kept = KeptDecision(folder=tmp_path, name=name, facts={})
    assert kept.find((1,)) is None
    assert kept.keep(DECISION, {}) is DECISION
    assert "cannot be kept" in caplog.text
