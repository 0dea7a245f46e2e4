"""Options of the PyTorch engine, and what "auto" means."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from engines.core.model import DenoiserModel
from engines.core.precision import PRECISIONS
from engines.core.spec import ParallelSpec
from engines.parallel.division import TeamSpecs
from engines.parallel.mesh import Groups
from engines.parallel.pipeline import pipeline_blocks
from engines.parallel.tensor import split_features
from engines.planner.auto import choose_specs, possible_team_sizes
from engines.torch_engine.fast_step import DEFAULT_OVERLAP, Overlap

CompileMode = Literal["auto", "eager", "per-block"]
PathMode = Literal["auto", "fast", "module"]
_COMPILE_MODES = ("auto", "eager", "per-block")
_PATHS = ("auto", "fast", "module")
FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchEngineConfig:
    """``strategy``: "auto", or what ``ParallelSpec.of`` takes. ``compile``: "eager", "per-block", or "auto".

    An "auto" strategy is chosen for steps of ``typical_tokens`` in the longest stream. ``precision`` is that of the
    linears: "native" computes in the dtype that the model was loaded in, as does "auto". "auto" compilation is
    per block on CUDA and none on the CPU, where it was slower than eager and took 20 s for each shape. "fp8" and "int8"
    measure the scale of every row of activations; "fp8-static" takes it from the file ``calibration``.

    ``path``: "fast" runs the family's hand-ordered step where it has one, "module" always its module; "auto" is "fast"
    on CUDA. ``capture`` (CUDA only) records each shape in a CUDA graph at its second step.
    """

    strategy: str = "auto"
    typical_tokens: int | None = None
    precision: str = "auto"
    calibration: Path | None = None
    compile: CompileMode = "auto"
    path: PathMode = "auto"
    capture: bool = True
    overlap: Overlap = DEFAULT_OVERLAP

    def __post_init__(self) -> None:
        if self.compile not in _COMPILE_MODES:
            raise ValueError(f"compile is {self.compile!r}; it must be one of {', '.join(_COMPILE_MODES)}")
        if self.path not in _PATHS:
            raise ValueError(f"path is {self.path!r}; it must be one of {', '.join(_PATHS)}")
        if (self.precision == "fp8-static") != (self.calibration is not None):
            raise ValueError(
                f"precision {self.precision!r} with calibration {self.calibration!r}: 'fp8-static' needs a calibration "
                "file, and nothing else takes one"
            )
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision is {self.precision!r}; the torch engine knows {', '.join(PRECISIONS)}")
        if self.strategy != "auto":
            ParallelSpec.of(self.strategy, 1)

    def resolve(self, model: DenoiserModel, device: torch.device) -> ResolvedConfig:
        """Concrete choices for a model on a device. ``ValueError`` if they cannot be made."""
        self._check_device(device)
        compile_blocks = self.compile == "per-block" or (self.compile == "auto" and device.type == "cuda")
        return ResolvedConfig(
            compile_blocks=compile_blocks,
            precision="native" if self.precision == "auto" else self.precision,
            calibration=self.calibration,
            fast=self.precision in ("auto", "native", "fp8") and self._takes_fast_path(model, device),
            capture=self.capture and device.type == "cuda",
            overlap=self.overlap,
        )

    def specs(
        self, model: DenoiserModel, *, rank: int, num_ranks: int, device: torch.device, groups: Groups
    ) -> TeamSpecs:
        """The divisions of a model's steps over a gang; all ranks make the call. ``ValueError`` if there are none."""
        if self.strategy != "auto":
            return TeamSpecs.of_sizes(possible_team_sizes(model, num_ranks), lambda size: self._named(model, size))
        return choose_specs(
            model,
            rank=rank,
            num_ranks=num_ranks,
            device=device,
            groups=groups,
            typical_tokens=self.typical_tokens,
            precision=self._scheme(),
        )

    @property
    def is_native(self) -> bool:
        """Whether linears compute in the model's own dtype."""
        return self._scheme() == "native"

    def _scheme(self) -> str:
        """What the linears compute in, as machines are measured."""
        return {"auto": "native", "fp8-static": "fp8"}.get(self.precision, self.precision)

    def _takes_fast_path(self, model: DenoiserModel, device: torch.device) -> bool:
        if self.path == "module" or model.fast is None or model.weights is not None:
            return False
        if self.path == "fast":
            return True
        return device.type == "cuda" and model.head_dim.bit_count() == 1  # the fused kernels take powers of two

    def _check_device(self, device: torch.device) -> None:
        if device.type == "cuda" and self.precision.startswith("fp8"):
            capability = torch.cuda.get_device_capability(device)
            if capability < FP8_CAPABILITY:
                name = torch.cuda.get_device_name(device)
                raise ValueError(
                    f"precision {self.precision!r} needs a GPU of compute capability 8.9 or later (Ada, Hopper); "
                    f"{name} has {capability[0]}.{capability[1]}: use 'native' or 'int8'"
                )

    def _named(self, model: DenoiserModel, team_size: int) -> tuple[ParallelSpec, ...]:
        paired = ParallelSpec.of(self.strategy, team_size)
        single = paired.without_guidance(keep_weights=model.weights is not None)
        for spec in (paired, single):
            spec.check(
                num_heads=model.num_heads,
                has_tensor_plan=bool(model.plan.linears),
                num_blocks=min(len(pipeline_blocks(module, model.plan)) for module in model.modules.values()),
                features=split_features(next(iter(model.modules.values())), model.plan),
            )
        return single, paired


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedConfig:
    """``fast``: the hand-ordered step where the team allows it. ``capture``: every shape in a CUDA graph."""

    compile_blocks: bool
    precision: str = "native"
    calibration: Path | None = None
    fast: bool = False
    capture: bool = False
    overlap: Overlap = DEFAULT_OVERLAP
