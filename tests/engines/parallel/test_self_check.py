"""The self-check passes on a sound gang and stops one whose exchange does nothing, even with weights that hide it."""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engines.core.engine import EagerEngine, RankContext
from engines.core.model import Branch, DenoiserModel
from engines.parallel.self_check import WrongAnswerError, self_check
from engines.registry import load_engine
from tests.engines.support import models
from tests.engines.support.gloo import gang


@pytest.mark.parametrize("strategy", ["auto", "ulysses", "guidance2xring2", "tensor"])
def test_a_sound_gang_passes(strategy: str) -> None:
    gang(4).run(load, strategy, "flux", None)


@pytest.mark.parametrize(
    ("strategy", "exchange"),
    [
        ("ulysses", "ulysses.all_to_all"),
        ("ring", "strategies.start_rotation"),
        ("tensor", "tensor.all_reduce_sum"),
    ],
)
def test_a_silent_exchange_stops_the_gang(strategy: str, exchange: str) -> None:
    for message in gang(4).run(load, strategy, "wan", exchange):
        assert message is not None
        assert f"with strategy {strategy}2 differ from one rank alone by" in message
        assert message.startswith(("ranks (0, 1)", "ranks (2, 3)"))


def test_a_silent_exchange_shows_even_if_the_weights_hide_it() -> None:
    assert None not in gang(4).run(load, "ulysses", "flux without attention", "ulysses.all_to_all")


def load(strategy: str, family: str, broken: str | None) -> str | None:
    """Load an engine. Return the error's text, or None."""
    context = RankContext(rank=dist.get_rank(), num_ranks=dist.get_world_size(), device="cpu")
    model = models.model("flux") if family == "flux" else models.model("wan")
    if family == "flux without attention":
        model = without_attention()
    silent = patch(f"engines.parallel.{broken}", lambda x, axis=None: x) if broken else nullcontext()
    try:
        with silent:
            load_engine("torch", model, context, strategy=strategy)
    except WrongAnswerError as error:
        return str(error)
    return None


def without_attention() -> DenoiserModel:
    from tests.support.flux_denoiser import as_denoiser

    module = models.transformer("flux")
    for name, weight in module.named_parameters():
        if ".to_out." in name or ".to_add_out." in name or ".to_v." in name or ".add_v_proj." in name:
            weight.data.zero_()
    return as_denoiser(module)


def test_error_survives_pickling() -> None:
    import pickle

    error = WrongAnswerError((0, 1), "ring2", 0.5, 1e-4)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert isinstance(error, RuntimeError)


def test_no_branch_may_be_anything_but_numbers() -> None:
    """Python's maximum of 0.1 and NaN is 0.1."""

    class SecondIsNaN(EagerEngine):
        def predict(self, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> tuple[Tensor, ...]:
            answers = torch.ones(len(branches), 4)
            if len(ranks) > 1:
                answers[1:] = torch.nan
            return answers.unbind(0)

    branches = (Branch(inputs={}), Branch(inputs={}))
    with pytest.raises(WrongAnswerError, match="by inf"):
        self_check(SecondIsNaN(), branches, rank=0, teams=[((0, 1), "guidance2")])


def test_a_model_of_which_no_step_is_known_is_not_checked(caplog: pytest.LogCaptureFixture) -> None:
    class Uncalled(EagerEngine):
        def predict(self, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> tuple[Tensor, ...]:
            raise AssertionError("there is nothing to predict")

    assert self_check(Uncalled(), (), rank=0, teams=[((0, 1), "ulysses2")]) == {}
    assert "no step is known" in caplog.text
