"""What a configuration may ask of a TensorRT engine, and what none can do. Without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from engines.core.engine import EngineChoice
from engines.core.spec import ParallelSpec, check_known, scheme_of

Weights = Literal["inputs", "constants"]

PRECISIONS = ("auto", "native", "fp8-static", "int8-static")
"""Scales are constants of an engine file, so they are static ones."""

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""Names under which users look for a dtype among precisions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRTOptions:
    """``weights``: inputs of one engine file for all fine-tunes, or constants of one per checkpoint. Engine files are
    kept in ``cache_dir`` (None: ``~/.cache/troupe/engines``).
    """

    weights: Weights = "inputs"
    cache_dir: Path | None = None

    def __post_init__(self) -> None:
        if self.weights not in get_args(Weights):
            raise ValueError(f"weights is {self.weights!r}; it must be inputs or constants")


def check(choice: EngineChoice) -> None:
    """Raise ``ValueError``, with the reason and what would work, if TensorRT cannot do what ``choice`` asks for."""
    options = choice.options or TensorRTOptions()
    assert isinstance(options, TensorRTOptions)
    check_device(gpus_per_rank=choice.gpus_per_rank)
    check_model(choice.eager_only)
    if choice.merges or choice.switches:
        raise ValueError(
            "engine: tensorrt takes no loras: its engine files are for weights as published; use engine: torch"
        )
    check_options(
        strategy=choice.strategy, precision=choice.precision, weights=options.weights, num_ranks=choice.num_ranks
    )


def check_model(eager_only: str) -> None:
    """Refuse a model of which it is known that no graph can be made; see ``EngineChoice``."""
    if eager_only:
        raise ValueError(f"{eager_only}, which no TensorRT engine does: use engine: torch")


def check_options(*, strategy: str, precision: str, weights: str, num_ranks: int | None = None) -> None:
    """Raises ValueError with the reason and what would work. Without ``num_ranks``, any that fits the strategy does."""
    check_known_precision(precision)
    if strategy == "auto":
        return
    spec = ParallelSpec.of(strategy, _some_num_ranks(strategy) if num_ranks is None else num_ranks)
    check_spec(spec, weights=weights)
    check_precision(spec, precision=precision)


def check_spec(spec: ParallelSpec, *, weights: str) -> None:
    """Refuse what would need communicators within the team, and what would need an engine file per rank."""
    if spec.tensor > 1 and spec.context > 1:
        raise ValueError(
            f"{spec.name} in TensorRT: tensor parallelism with split tokens needs two communicators, and TensorRT "
            f"ignores the groups of a collective (it would exchange with the wrong ranks, in silence). "
            f"Use tensor{spec.num_ranks} or ulysses{spec.num_ranks} alone, or engine: torch"
        )
    if spec.pipeline > 1:
        raise ValueError(
            f"{spec.name} in TensorRT: a pipeline gives every rank other layers, and all ranks of a team load one "
            f"engine file. Use ulysses{spec.num_ranks} or tensor{spec.num_ranks}, or engine: torch"
        )
    if spec.tensor > 1 and weights == "constants":
        raise ValueError(f"{spec.name} with weights: constants needs one engine file per rank; use weights: inputs")


def check_precision(spec: ParallelSpec, *, precision: str) -> None:
    if scheme_of(precision) and spec.tensor > 1:
        raise ValueError(
            f"{precision} with {spec.name}: scales are those of whole weights; use ulysses or allgather_kv"
        )


def check_known_precision(precision: str) -> None:
    """Raises ValueError with what there is, and what to write instead of names that others use."""
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


def _some_num_ranks(strategy: str) -> int:
    """A number of ranks at which a strategy's name can be checked: 4 shows its axes, a product has its own."""
    for num_ranks in (4, 2, 8, 3, 6, 12, 16):
        try:
            ParallelSpec.of(strategy, num_ranks)
        except ValueError:
            continue
        return num_ranks
    return 4  # and ParallelSpec says what is wrong with it
