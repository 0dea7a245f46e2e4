"""Options of a TensorRT engine, and checks of a configuration. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from engines.core.engine import EngineChoice
from engines.core.spec import ParallelSpec, check_attention_choice, check_known, scheme_of

Weights = Literal["inputs", "constants"]

PRECISIONS = ("auto", "native", "fp8-static", "int8-static")
"""Quantisation scales are constants of an engine file, hence static."""

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""dtype names that users may give as a precision by mistake."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRTOptions:
    weights: Weights = "inputs"
    """Inputs of one engine file for all fine-tunes, or constants of one engine file per checkpoint."""
    cache_dir: Path | None = None
    """Folder of engine files; None: ``~/.cache/troupe/engines``."""

    def __post_init__(self) -> None:
        if self.weights not in get_args(Weights):
            raise ValueError(f"weights is {self.weights!r}; it must be inputs or constants")


def check(choice: EngineChoice) -> None:
    """Raise ``ValueError``, with the reason and an alternative, if TensorRT does not support ``choice``."""
    options = choice.options or TensorRTOptions()
    assert isinstance(options, TensorRTOptions)
    check_device(gpus_per_rank=choice.gpus_per_rank)
    check_model(choice.eager_only)
    for attention in (choice.attention, *choice.attentions):
        check_attention(attention)
    if choice.merges or choice.switches:
        raise ValueError(
            "engine: tensorrt takes no loras: its engine files are for weights as published; use engine: torch"
        )
    check_options(
        strategy=choice.strategy, precision=choice.precision, weights=options.weights, num_ranks=choice.num_ranks
    )


def check_model(eager_only: str) -> None:
    """Raise ValueError for a model that cannot be exported; see ``EngineChoice.eager_only``."""
    if eager_only:
        raise ValueError(f"{eager_only}, which no TensorRT engine does: use engine: torch")


def check_attention(attention: str) -> None:
    """Raise ValueError for attention in float8, which an engine file has none of."""
    check_attention_choice(attention)
    if attention != "auto":
        raise ValueError(
            f"attention is {attention!r}; TensorRT computes attention in the model's dtype: leave attention out, or "
            "use engine: torch"
        )


def check_options(*, strategy: str, precision: str, weights: str, num_ranks: int | None = None) -> None:
    """Raise ValueError, with an alternative. Without ``num_ranks``, check a number of ranks that fits the strategy."""
    check_known_precision(precision)
    if strategy == "auto":
        return
    spec = ParallelSpec.of(strategy, _valid_num_ranks(strategy) if num_ranks is None else num_ranks)
    check_spec(spec, weights=weights)
    check_precision(spec, precision=precision)


def check_spec(spec: ParallelSpec, *, weights: str) -> None:
    """Raise ValueError for divisions that need communicators within the team or an engine file per rank."""
    if spec.tensor > 1 and spec.context > 1:
        raise ValueError(
            f"{spec.name} in TensorRT: tensor parallelism with split tokens needs two communicators, and TensorRT "
            f"ignores the groups of a collective (it would silently exchange with the wrong ranks). "
            f"Use tensor{spec.num_ranks} or ulysses{spec.num_ranks} alone, or engine: torch"
        )
    if spec.pipeline > 1:
        raise ValueError(
            f"{spec.name} in TensorRT: a pipeline gives each rank its own layers, but all ranks of a team load one "
            f"engine file. Use ulysses{spec.num_ranks} or tensor{spec.num_ranks}, or engine: torch"
        )
    if spec.tensor > 1 and weights == "constants":
        raise ValueError(f"{spec.name} with weights: constants needs one engine file per rank; use weights: inputs")


def check_precision(spec: ParallelSpec, *, precision: str) -> None:
    if scheme_of(precision) and spec.tensor > 1:
        raise ValueError(f"{precision} with {spec.name}: scales belong to whole weights; use ulysses or allgather_kv")


def check_known_precision(precision: str) -> None:
    """Raise ValueError for an unknown precision, with the right spelling for common mistakes."""
    if precision in DTYPES:
        raise ValueError(
            f"precision is {precision!r}; native computes in the model's dtype, so set that to {DTYPES[precision]}"
        )
    if f"{precision}-static" in PRECISIONS:
        raise ValueError(
            f"precision is {precision!r}; an engine file holds fixed scales, so write {precision}-static, which needs "
            "a calibration"
        )
    check_known(precision, PRECISIONS, "TensorRT")


def check_device(*, gpus_per_rank: float) -> None:
    if not gpus_per_rank:
        raise ValueError(
            "engine: tensorrt runs on GPUs, and gpus_per_rank is 0: give each rank one, or use engine: torch"
        )


def _valid_num_ranks(strategy: str) -> int:
    """Return a number of ranks that the strategy accepts, 4 if it can: this shows all axes of a hybrid."""
    for num_ranks in (4, 2, 8, 3, 6, 12, 16):
        try:
            ParallelSpec.of(strategy, num_ranks)
        except ValueError:
            continue
        return num_ranks
    return 4  # ParallelSpec raises the error
