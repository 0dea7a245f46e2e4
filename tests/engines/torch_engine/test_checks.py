"""A gang with weights in files runs its checks at start."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engines.core.engine import RankContext
from engines.core.model import Branch, DenoiserModel, with_attention
from engines.core.tensors import relative_difference
from engines.parallel.self_check import WrongAnswerError
from engines.registry import load_engine
from engines.torch_engine import checks
from engines.torch_engine.checks import check_fp8_attention, check_sliced
from engines.torch_engine.engine import TorchEngine
from tests.engines.support import models


class BrokenEngine(TorchEngine):
    """An engine whose answers are NaN."""

    def predict(self, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> tuple[Tensor, ...]:
        return tuple(torch.full_like(answer, torch.nan) for answer in super().predict(branches, ranks))


def test_the_right_answer_passes() -> None:
    assert check(TorchEngine) < 1e-5


def test_an_answer_that_is_no_number_is_wrong() -> None:
    with pytest.raises(WrongAnswerError, match="differ from one rank alone by inf"):
        check(BrokenEngine)


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_a_precision_that_would_quantise_nothing_is_refused(precision: str) -> None:
    model = models.model("flux")
    whole = replace(model, plan=replace(model.plan, linears=()))
    with pytest.raises(ValueError, match=f"precision is '{precision}', and no linears of this model can be quantised"):
        TorchEngine(whole, strategy="ulysses", precision=precision)
    TorchEngine(whole, strategy="ulysses", precision="native").close()


def test_attention_in_float8_is_compared_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.model("flux")
    engine = TorchEngine(model, strategy="ulysses", attention="fp8")
    differences = check_fp8_attention(engine, model, rank=0)
    assert differences
    assert all(0.005 < difference < checks.MAX_ATTENTION_ERROR for difference in differences.values())
    assert engine.config.attention == "fp8"
    assert check_fp8_attention(engine, model, rank=0) == differences
    monkeypatch.setattr(checks, "MAX_ATTENTION_ERROR", 0.001)
    with pytest.raises(ValueError, match=r"attention: fp8 changes a step of .* by 0\.0.*0\.001 is allowed.*leave"):
        check_fp8_attention(engine, model, rank=0)
    engine.close()


@pytest.mark.parametrize("choice", [{"attention": "fp8"}, {"attentions": ("fp8",)}], ids=str)
def test_a_gang_whose_steps_it_changes_too_much_does_not_start(
    choice: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gang itself may compute so, or requests may ask for it."""
    here = RankContext(rank=0, num_ranks=1, device="cpu")
    load_engine("torch", models.model("flux"), here, strategy="ulysses", **choice).close()
    monkeypatch.setattr(checks, "MAX_ATTENTION_ERROR", 0.001)
    with pytest.raises(ValueError, match="attention: fp8 changes a step of this model"):
        load_engine("torch", models.model("flux"), here, strategy="ulysses", **choice)


def test_a_hand_ordered_step_has_the_same_attention() -> None:
    model, branches = models.model("flux"), models.branches("flux", "uneven")
    ways: list[dict[str, Any]] = [{"attention": "fp8"}, {"attention": "fp8", "fast": True}, {"fast": True}]
    engines = [TorchEngine(model, strategy="ulysses", **way) for way in ways]
    (module,), (fast,), (exact,) = (engine.predict(branches, (0,)) for engine in engines)
    assert relative_difference(fast, module) < 0.3 * relative_difference(fast, exact)
    (named,) = engines[2].predict(with_attention(branches, "fp8"), (0,))
    assert torch.equal(named, fast)
    assert check_fp8_attention(engines[2], model, rank=0) == {}
    for engine in engines:
        engine.close()


def check(made: type[TorchEngine]) -> float:
    """Check on one rank, whose only strategy has no name to configure."""

    def make(model: DenoiserModel, *, strategy: str) -> TorchEngine:
        return made(model, strategy="ulysses")

    model = models.model("flux")
    return check_sliced(TorchEngine(model, strategy="ulysses"), model, make, rank=0)
