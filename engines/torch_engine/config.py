"""Options of the PyTorch engine, and what "auto" means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from engines.model import DenoiserModel
from engines.parallel.mesh import gang_widths
from engines.parallel.spec import ParallelSpec

CompileMode = Literal["auto", "eager", "per-block"]
_COMPILE_MODES = ("auto", "eager", "per-block")
_PRECISIONS = ("auto", "native")


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchEngineConfig:
    """``strategy``: "auto", or what ``ParallelSpec.of`` takes. ``compile``: "eager", "per-block", or "auto".

    ``precision`` is that of the linears: "native" computes in the dtype that the model was loaded in, as does "auto".
    """

    strategy: str = "auto"
    precision: str = "auto"
    compile: CompileMode = "auto"

    def __post_init__(self) -> None:
        if self.compile not in _COMPILE_MODES:
            raise ValueError(f"compile is {self.compile!r}; it must be one of {', '.join(_COMPILE_MODES)}")
        if self.precision not in _PRECISIONS:
            raise ValueError(f"precision is {self.precision!r}; the torch engine knows {', '.join(_PRECISIONS)}")
        if self.strategy != "auto":
            ParallelSpec.of(self.strategy, 1)

    def resolve(self, model: DenoiserModel, *, num_ranks: int, device: torch.device) -> ResolvedConfig:
        """Concrete choices for a model and a gang. Raises ``ValueError`` if all its ranks cannot share one step."""
        specs = {width: spec for width in gang_widths(num_ranks) if (spec := self._spec(model, width, num_ranks))}
        compile_blocks = self.compile == "per-block" or (self.compile == "auto" and device.type == "cuda")
        return ResolvedConfig(specs=specs, compile_blocks=compile_blocks)

    def _spec(self, model: DenoiserModel, width: int, num_ranks: int) -> tuple[ParallelSpec, ParallelSpec] | None:
        try:
            paired = _auto(model, width) if self.strategy == "auto" else ParallelSpec.of(self.strategy, width)
            single = paired.without_guidance()
            for spec in (paired, single):
                spec.check(num_heads=model.num_heads, has_tensor_plan=bool(model.plan.linears))
        except ValueError:
            if width == num_ranks:
                raise
            return None  # narrower teams are a convenience: predict() lists the widths that there are
        return single, paired


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedConfig:
    """``specs[width]`` are the divisions of one branch, and of two branches of the same shape."""

    specs: dict[int, tuple[ParallelSpec, ParallelSpec]]
    compile_blocks: bool

    def spec(self, width: int, num_branches: int) -> ParallelSpec:
        if width not in self.specs:
            allowed = ", ".join(str(width) for width in self.specs)
            raise ValueError(f"this gang cannot divide a step over {width} ranks; allowed: {allowed}")
        return self.specs[width][num_branches - 1]

    def all_specs(self) -> tuple[ParallelSpec, ...]:
        return tuple(dict.fromkeys(spec for pair in self.specs.values() for spec in pair))


def _auto(model: DenoiserModel, width: int) -> ParallelSpec:
    """Ulysses as far as the heads allow, which exchanges least; keys and values are gathered over the rest."""
    ulysses = max(n for n in range(1, width + 1) if width % n == 0 and model.num_heads % n == 0)
    return ParallelSpec(ulysses=ulysses, allgather_kv=width // ulysses)
