import pytest

from engines.core.engine import RankContext
from engines.registry import load_engine
from tests.engines.support import models


def test_unknown_engine_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown engine 'jax'; known: torch, tensorrt"):
        load_engine("jax", models.model("wan"), RankContext(rank=0, num_ranks=1, device="cpu"))


def test_unknown_precision_lists_the_known_ones() -> None:
    context = RankContext(rank=0, num_ranks=1, device="cpu")
    with pytest.raises(ValueError, match="precision is 'fp3'; the torch engine knows auto, native"):
        load_engine("torch", models.model("wan"), context, precision="fp3")
