"""Configuration of a TensorRT engine, resolved for a model, a number of ranks and a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from engines.core.attention import heads_of_one
from engines.core.model import DenoiserModel, dtype_of
from engines.core.spec import ParallelSpec, scheme_of
from engines.tensorrt_engine.build.bindings import Target, load_bindings
from engines.tensorrt_engine.build.caches import DEFAULT_FOLDER
from engines.tensorrt_engine.rules import TensorRTOptions, Weights, check_options, check_precision, check_spec

RingForm = Literal["none", "segments", "native"]
MIN_FUSED_HEADS = 2
"""Heads per rank from which TensorRT fuses attention. With one, fp16 fails to build and bf16 is silently unfused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRTConfig:
    """Configuration of a TensorRT engine, where "auto" is allowed."""

    strategy: str = "auto"
    """"auto", or an argument of ``ParallelSpec.of``."""
    precision: str = "auto"
    """One of ``rules.PRECISIONS``."""
    options: TensorRTOptions = field(default_factory=TensorRTOptions)
    """How files are made and run."""

    def __post_init__(self) -> None:
        check_options(strategy=self.strategy, precision=self.precision, weights=self.weights)

    @property
    def weights(self) -> Weights:
        return self.options.weights

    @property
    def cache_dir(self) -> Path:
        """The folder of engine files, exports and calibrations."""
        return self.options.cache_dir or DEFAULT_FOLDER

    def specs(self, model: DenoiserModel, team_size: int, target: Target) -> tuple[ParallelSpec, ...]:
        """Return a team's division of one branch, of two in parallel, and so on. ValueError if there is none."""
        specs = self.resolve(model, team_size, target).spec.by_branches()
        for spec in specs:
            spec.check(num_heads=model.num_heads, has_tensor_plan=bool(model.plan.linears))
        return specs

    def spec(self, num_ranks: int, *, num_heads: int | None = None) -> ParallelSpec:
        """Return the division over ``num_ranks``. "auto" is Ulysses if every rank has two heads, else AllGather-KV."""
        if self.strategy != "auto":
            return ParallelSpec.of(self.strategy, num_ranks)
        fits = num_heads is None or (num_heads % num_ranks == 0 and num_heads // num_ranks >= MIN_FUSED_HEADS)
        return ParallelSpec.of("ulysses" if fits else "allgather_kv", num_ranks)

    def resolve(self, model: DenoiserModel, num_ranks: int, target: Target) -> ResolvedConfig:
        """Return concrete choices for a model, a number of ranks and a GPU. ValueError if they do not fit together."""
        model.check_planned(num_ranks)
        spec = self.spec(num_ranks, num_heads=model.num_heads)
        spec.check(num_heads=model.num_heads, has_tensor_plan=bool(model.plan.linears))
        check_spec(spec, weights=self.weights)
        check_precision(spec, precision=self.precision)
        if scheme_of(self.precision) == "fp8" and not target.has_fp8:
            raise ValueError(f"fp8 needs compute capability 8.9; {target.name} has none: use int8-static or native")
        precision = self.precision if scheme_of(self.precision) else _dtype_name(model)
        heads = heads_of_one(model.num_heads, spec.ulysses * spec.tensor)
        if spec.num_ranks > 1 and heads < MIN_FUSED_HEADS and precision != "float32":
            raise ValueError(
                f"{spec.name} leaves {heads} of {model.num_heads} heads on a rank; TensorRT fuses half-precision "
                f"attention from {MIN_FUSED_HEADS} heads: use fewer ranks, or allgather_kv, which keeps all heads"
            )
        ring = ring_form(spec, target)
        if ring == "segments" and self.weights == "constants":
            raise ValueError(
                f"{spec.name} with weights: constants on {target.name}: a ring cuts the engine into segments that "
                f"blocks of one type share, with weights as inputs; use weights: inputs, or ulysses{spec.num_ranks}"
            )
        return ResolvedConfig(spec=spec, precision=precision, ring=ring, target=target)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedConfig:
    """The same for one model, team and GPU, without "auto"."""

    spec: ParallelSpec
    """How ranks divide a step."""
    precision: str
    """A quantised precision, or the name of the model's dtype."""
    ring: RingForm
    """Where a ring runs: in TensorRT, or in torch between segments."""
    target: Target
    """GPU that files are built for."""


def ring_form(spec: ParallelSpec, target: Target) -> RingForm:
    """Return how a ring runs: by TensorRT ("native"), if supported, or in torch between segments of the engine.

    With Ulysses, the group-free hybrid needs neither ("none").
    """
    if spec.ring == 1 or spec.ulysses > 1:
        return "none"
    return "native" if target.has_native_ring and load_bindings().product == "tensorrt" else "segments"


def _dtype_name(model: DenoiserModel) -> str:
    return str(dtype_of(next(iter(model.modules.values())))).removeprefix("torch.")
