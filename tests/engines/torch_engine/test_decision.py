"""The file of a decision: what replaces it, and what it depends on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engines.core.spec import ParallelSpec
from engines.parallel.division import TeamSpecs
from engines.torch_engine import autotune
from engines.torch_engine.decision import Decision, DecisionFile
from engines.torch_engine.options import TorchOptions
from tests.engines.support import models
from tests.engines.torch_engine.support.decisions import choosing

DECISION = Decision(specs=TeamSpecs(by_size={2: (ParallelSpec.of("ulysses", 2), ParallelSpec.of("ring", 2))}))


def test_a_decision_that_does_not_suit_the_model_is_replaced(tmp_path: Path) -> None:
    def check(spec: ParallelSpec) -> None:
        if spec.ring > 1:
            raise ValueError("no rings")

    file = DecisionFile(folder=tmp_path, name="tiny", facts={})
    file.write(DECISION, {})
    assert file.read((2,)) == DECISION
    strict = replace(file, check=check)
    assert strict.read((2,)) is None
    other = Decision(specs=TeamSpecs(by_size={2: (ParallelSpec.of("ulysses", 2),) * 2}))
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


def test_attention_in_float8_is_decided_on_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, files are named as before there was a choice."""
    monkeypatch.setattr(autotune, "from_all_ranks", lambda value: [value])
    model, how, options = models.model("flux"), choosing(tmp_path), TorchOptions()
    auto, fp8 = (autotune._decision_file(model, how, "native", each, options) for each in ("auto", "fp8"))
    assert "attention" not in auto.facts
    assert fp8.facts == {**auto.facts, "attention": "fp8"}
    assert fp8.path != auto.path
    on_host = autotune._decision_file(model, how, "native", "auto", TorchOptions(originals_on_host=True))
    assert on_host.facts == {**auto.facts, "originals_on_host": "True"}, "other strategies fit"
