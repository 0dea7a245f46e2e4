"""What a gang with weights in files checks at its start."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engines.core.model import Branch, DenoiserModel
from engines.parallel.self_check import WrongAnswerError
from engines.torch_engine.checks import check_sliced
from engines.torch_engine.engine import TorchEngine
from tests.engines.support import models


class BrokenEngine(TorchEngine):
    """One whose answers are no numbers."""

    def predict(self, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> tuple[Tensor, ...]:
        return tuple(torch.full_like(answer, torch.nan) for answer in super().predict(branches, ranks))


def test_the_right_answer_passes() -> None:
    assert check(TorchEngine) < 1e-5


def test_an_answer_that_is_no_number_is_wrong() -> None:
    with pytest.raises(WrongAnswerError, match="differ from one rank alone by inf"):
        check(BrokenEngine)


def check(made: type[TorchEngine]) -> float:
    """On one rank, whose only strategy has no name that may be asked for."""

    def make(model: DenoiserModel, *, strategy: str) -> TorchEngine:
        return made(model, strategy="ulysses")

    model = models.model("flux")
    return check_sliced(TorchEngine(model, strategy="ulysses"), model, make, rank=0)
