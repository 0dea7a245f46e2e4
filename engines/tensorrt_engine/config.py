"""Options of the TensorRT engine: checked when they are read, refused with a reason and what would work instead."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch

from engines.model import DenoiserModel, dtype_of
from engines.parallel.spec import ParallelSpec
from engines.tensorrt_engine.bindings import load_bindings
from engines.tensorrt_engine.plan_cache import DEFAULT_FOLDER
from engines.tensorrt_engine.targets import Target

Precision = Literal["auto", "native", "fp32", "fp16", "bf16", "int8", "fp8"]
RingForm = Literal["none", "segments", "native"]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
MIN_FUSED_HEADS = 2
"""With one head per rank TensorRT builds no fused attention (fp16 fails, bf16 is silently unfused)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRTConfig:
    """``strategy``: "auto", or what ``ParallelSpec.of`` takes. ``precision`` "auto" is the dtype of the loaded model.

    "int8" and "fp8" quantize the linears, with the model's dtype for the rest. ``weights`` "inputs" makes one plan for
    all fine-tunes; "constants" lets TensorRT merge and pack them, in one plan per checkpoint.
    """

    strategy: str = "auto"
    precision: Precision = "auto"
    weights: Literal["inputs", "constants"] = "inputs"
    cache_dir: Path = DEFAULT_FOLDER

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            raise ValueError(
                f"precision is {self.precision!r}; the TensorRT engine knows {', '.join(get_args(Precision))}"
            )
        if self.weights not in ("inputs", "constants"):
            raise ValueError(f"weights is {self.weights!r}; it must be inputs or constants")
        if self.strategy != "auto":
            check_spec(self.spec(_smallest_width(self.strategy)), weights=self.weights)

    def spec(self, width: int, *, num_heads: int | None = None) -> ParallelSpec:
        """The division over ``width`` ranks. "auto" is Ulysses while every rank has two heads, then AllGather-KV."""
        if self.strategy != "auto":
            return ParallelSpec.of(self.strategy, width)
        fits = num_heads is None or (num_heads % width == 0 and num_heads // width >= MIN_FUSED_HEADS)
        return ParallelSpec.of("ulysses" if fits else "allgather_kv", width)

    def resolve(self, model: DenoiserModel, width: int, target: Target) -> ResolvedConfig:
        """Concrete choices for a model, a width and a GPU. ValueError says why a combination cannot be."""
        spec = self.spec(width, num_heads=model.num_heads)
        spec.check(num_heads=model.num_heads, has_tensor_plan=bool(model.plan.linears))
        check_spec(spec, weights=self.weights)
        precision = _precision(self.precision, dtype_of(next(iter(model.modules.values()))))
        if precision == "fp8" and not target.has_fp8:
            raise ValueError(f"fp8 needs compute capability 8.9; {target.name} has none: use int8, bf16 or fp16")
        if precision in ("int8", "fp8") and spec.tensor > 1:
            raise ValueError(
                f"{precision} with {spec.name}: scales are those of whole weights; use ulysses or allgather_kv"
            )
        heads = model.num_heads // (spec.ulysses * spec.tensor)
        if spec.width > 1 and heads < MIN_FUSED_HEADS and precision != "fp32":
            raise ValueError(
                f"{spec.name} leaves {heads} of {model.num_heads} heads on a rank; TensorRT fuses half-precision "
                f"attention from {MIN_FUSED_HEADS} heads on: use fewer ranks, or allgather_kv, which keeps all heads"
            )
        return ResolvedConfig(spec=spec, precision=precision, ring=ring_form(spec, target), target=target)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedConfig:
    """``precision`` is concrete; ``ring`` says how a ring runs, if there is one."""

    spec: ParallelSpec
    precision: str
    ring: RingForm
    target: Target


def check_spec(spec: ParallelSpec, *, weights: str) -> None:
    """Refuse what would need communicators within the team, and what would need a plan per rank."""
    if spec.tensor > 1 and spec.context > 1:
        raise ValueError(
            f"{spec.name} in TensorRT: tensor parallelism with split tokens needs two communicators, and TensorRT "
            f"ignores the groups of a collective (it would exchange with the wrong ranks, in silence). "
            f"Use tensor{spec.width} or ulysses{spec.width} alone, or engine: torch"
        )
    if spec.pipeline > 1:
        raise ValueError(
            f"{spec.name} in TensorRT: a pipeline gives every rank other layers, and all ranks of a team load one "
            f"plan. Use ulysses{spec.width} or tensor{spec.width}, or engine: torch"
        )
    if spec.tensor > 1 and weights == "constants":
        raise ValueError(f"{spec.name} with weights: constants needs one plan per rank; use weights: inputs")


def ring_form(spec: ParallelSpec, target: Target) -> RingForm:
    """Alone, a ring is TensorRT's own where it has one, else the torch engine's between segments of the engine.

    With Ulysses it is the group-free hybrid, which needs neither.
    """
    if spec.ring == 1 or spec.ulysses > 1:
        return "none"
    return "native" if target.has_native_ring and load_bindings().product == "tensorrt" else "segments"


def _precision(wanted: str, dtype: torch.dtype) -> str:
    names = {dtype: name for name, dtype in DTYPES.items()}
    native = names[dtype]
    if wanted in ("auto", "native"):
        return native
    if wanted in DTYPES and wanted != native:
        raise ValueError(
            f"precision is {wanted}, but the model was loaded in {native}: set the model's dtype to {wanted}"
        )
    return wanted


def _smallest_width(strategy: str) -> int:
    """A width at which a strategy's name can be checked: 4 shows its axes, a product has its own."""
    for width in (4, 2, 8, 3, 6, 12, 16):
        try:
            ParallelSpec.of(strategy, width)
        except ValueError:
            continue
        return width
    return 4  # and ParallelSpec says what is wrong with it
