"""Exported engines with heads that the ranks do not divide, and with grouped key heads; a mask or prefix is refused."""

from __future__ import annotations

import typing
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from engines.core.attention import Kernel, Prefix
from engines.core.model import Branch, DenoiserModel
from engines.core.spec import ParallelSpec
from engines.tensorrt_engine.build.report import read_engine_text
from engines.tensorrt_engine.export.exported import export, export_segments
from engines.tensorrt_engine.export.trace import offline_team
from tests.engines.tensorrt_engine.conftest import Build
from tests.engines.tensorrt_engine.support.all_ranks import export_case, relative_error
from tests.engines.tensorrt_engine.support.cases import TOLERANCE
from tests.engines.tensorrt_engine.support.zoo import SPECIMENS, cast, reference

FLUX = SPECIMENS["flux"]


def with_key_heads(model: DenoiserModel, number: int) -> DenoiserModel:
    """Return the model with the first ``number`` key heads only."""

    def set_kernel(module: nn.Module, kernel: Kernel) -> None:
        model.set_kernel(module, typing.cast("Kernel", lambda q, k, v: kernel(q, k[:, :, :number], v[:, :, :number])))

    return replace(model, set_kernel=set_kernel)


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "key_heads"),
    [
        ("ulysses", 3, 2),  # both: heads that the ranks do not divide, and fewer key heads than ranks
        pytest.param("ulysses", 3, 8, marks=pytest.mark.slow),
        pytest.param("ulysses", 4, 2, marks=pytest.mark.slow),
        pytest.param("ulysses3xring2", 6, 4, marks=pytest.mark.slow),
        ("allgather_kv", 2, 2),
    ],
)
def test_every_rank_predicts_what_one_device_does(strategy: str, num_ranks: int, key_heads: int) -> None:
    """Eight query heads on three ranks are three each, with one of zeros."""
    model, inputs = with_key_heads(FLUX.model(), key_heads), FLUX.inputs()
    case = export_case(model, inputs, ParallelSpec.of(strategy, num_ranks))
    expected = reference(with_key_heads(FLUX.model(), key_heads), inputs)
    for prediction in case.predictions(inputs):
        assert relative_error(prediction, expected) <= TOLERANCE["fp32"]
    assert relative_error(case.predictions(inputs, skip_collectives={0})[0], expected) > 20 * TOLERANCE["fp32"]


def test_uneven_heads_build_with_fused_attention(build_file: Build) -> None:
    model = FLUX.model()
    model.modules["transformer"].to(torch.float16)
    case = export_case(model, cast(FLUX, FLUX.inputs(), torch.float16), ParallelSpec(ulysses=3))
    text = read_engine_text(build_file(case.exported.graph.serialized()))
    assert text is not None
    assert text.num_fused_attentions == 2


SENTENCES = {
    "mask": r"^this model masks keys \(text of several lengths\), which no TensorRT engine does: use engine: torch$",
    "prefix": "^in this model some tokens see only those before them, which no TensorRT engine does: ",
}
SAID: dict[str, Callable[[Tensor], dict[str, typing.Any]]] = {
    "mask": lambda q_BLHD: {"mask_BM": q_BLHD[:, :, 0, 0] > 0},
    "prefix": lambda q_BLHD: {"prefix": Prefix(*(torch.arange(q_BLHD.shape[1]) + more for more in (1, 0)))},
}


@pytest.mark.parametrize("strategy", ["ulysses", "hybrid", "ring", "allgather_kv"])
@pytest.mark.parametrize("what", SAID)
def test_a_mask_and_a_prefix_are_refused(strategy: str, what: str) -> None:
    model, branch = FLUX.model(), Branch(inputs=FLUX.inputs())

    def set_kernel(module: nn.Module, kernel: Kernel) -> None:
        model.set_kernel(module, typing.cast("Kernel", lambda q, k, v: kernel(q, k, v, **SAID[what](q))))

    masked = replace(model, set_kernel=set_kernel)
    with (
        offline_team(ParallelSpec.of(strategy, 4)) as team,
        pytest.raises(ValueError, match=SENTENCES[what]),
    ):
        (export_segments if strategy == "ring" else export)(masked, branch, team)
