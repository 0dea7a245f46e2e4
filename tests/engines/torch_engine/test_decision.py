"""A decision's file is replaced when it must be, and depends on the right inputs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engines.core.spec import ParallelSpec
from engines.parallel.division import TeamSpecs
from engines.torch_engine import autotune
from engines.torch_engine.decision import REVISION, Decision, DecisionFile
from engines.torch_engine.exchange.choose import ExchangeRules
from engines.torch_engine.options import TorchOptions
from tests.engines.support import models
from tests.engines.torch_engine.support.decisions import choosing

DECISION = Decision(
    specs=TeamSpecs(by_size={2: (ParallelSpec.of("ulysses", 2), ParallelSpec.of("ring", 2))}), exchange=ExchangeRules()
)


def test_a_decision_that_does_not_suit_the_model_is_replaced(tmp_path: Path) -> None:
    def check(spec: ParallelSpec) -> None:
        if spec.ring > 1:
            raise ValueError("no rings")

    file = DecisionFile(folder=tmp_path, name="tiny", facts={})
    file.write(DECISION, {})
    assert file.read((2,)) == DECISION
    strict = replace(file, check=check)
    assert strict.read((2,)) is None
    other = replace(DECISION, specs=TeamSpecs(by_size={2: (ParallelSpec.of("ulysses", 2),) * 2}))
    assert strict.write(other, {}) is other
    assert strict.read((2,)) == other


@pytest.mark.parametrize("name", ["taken/tiny", "t" * 300])
def test_a_folder_that_takes_no_file_costs_a_warning(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "taken").touch()
    file = DecisionFile(folder=tmp_path, name=name, facts={})
    assert file.read((2,)) is None
    assert file.write(DECISION, {}) is DECISION
    assert "cannot be written" in caplog.text


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"attention": "fp8"}, {"attention": "fp8"}),
        ({"options": TorchOptions(originals_on_host=True)}, {"originals_on_host": "True"}),  # other strategies fit
        ({}, {"revision": "another"}),
    ],
    ids=["attention in float8", "originals on the host", "an upgrade within a version"],
)
def test_it_is_decided_anew_for(
    change: dict[str, Any], fact: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autotune, "from_all_ranks", lambda value: [value])
    usual: dict[str, Any] = {"precision": "native", "attention": "auto", "options": TorchOptions()}
    make = partial(autotune._decision_file, models.model("flux"), choosing(tmp_path))
    before = make(**usual)
    before.write(DECISION, {})
    assert make(**usual).read((2,)) == DECISION
    monkeypatch.setattr(autotune, "REVISION", fact.get("revision", REVISION))
    after = make(**{**usual, **change})
    assert after.facts == {**before.facts, **fact}
    assert after.read((2,)) is None
