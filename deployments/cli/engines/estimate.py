"""``troupe estimate``: each way to divide a step over some ranks, with predicted time and memory, and the choice.

The choice is the one that ``strategy: auto`` makes for the same machine and step.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deployments.cli.progress import console
from deployments.settings import Settings

if TYPE_CHECKING:
    import torch

    from engines.planner.forecast import StepForecast
    from engines.planner.machine import Machine
    from engines.planner.profile import ModelProfile
    from pipelines.defaults import Defaults
    from pipelines.request import MediaRequest
    from pipelines.size import Size

PAPER_MACHINE = "h200"
GUIDED = 2.0
"""Any true guidance scale: that it is above 1 is what gives a step its second branch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EstimateOptions:
    """What the command line says. ``machine``: the name of a known machine, or a file that a measurement left."""

    model: str
    num_ranks: int
    size: str | None = None
    num_frames: int | None = None
    guided: bool | None = None
    dtype: str = "auto"
    precision: str = "native"
    machine: str | None = None
    measure: bool = False

    def wanted_size(self, defaults: Defaults) -> Size:
        from pipelines.size import Size

        size = Size.parse(self.size) if self.size else Size(width=defaults.width, height=defaults.height)
        return size if self.num_frames is None else replace(size, num_frames=self.num_frames)

    def request(self, defaults: Defaults) -> MediaRequest:
        guided = defaults.true_cfg_scale > 1 if self.guided is None else self.guided
        scale = max(defaults.true_cfg_scale, GUIDED) if guided else 1.0
        return defaults.request(self.wanted_size(defaults), true_cfg_scale=scale)


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """``origin`` says where the machine's figures come from."""

    request: MediaRequest
    dtype: torch.dtype
    forecast: StepForecast
    origin: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsAlone:
    """All that is known, on one rank, of a model of whose steps nothing is before there is a request."""

    model: str
    dtype: torch.dtype
    num_parameters: int
    weight_bytes: int

    def lines(self) -> list[str]:
        weights = f"{self.num_parameters / 1e9:.1f} B parameters, {self.weight_bytes / 2**30:.1f} GiB on the one rank"
        return [f"{self.model}, {_name(self.dtype)}: {weights}", f"no time: {self.reason}"]

    @property
    def reason(self) -> str:
        return f"a step of {self.model} is not known before there is a request"

    def document(self) -> dict[str, Any]:
        """The same for programs, which find no candidates."""
        weights = {"num_parameters": self.num_parameters, "weight_bytes": self.weight_bytes}
        told = {"model": self.model, "num_ranks": 1, "dtype": _name(self.dtype), **weights}
        return {**told, "candidates": [], "chosen": None, "reason": self.reason}


def make_estimate(options: EstimateOptions) -> Estimate | WeightsAlone:
    """Reads configurations only. ValueError for what the model, or the machine, does not allow."""
    import torch

    from engines.planner.forecast import forecast, workload
    from engines.planner.profile import profile
    from engines.torch_engine.config import check_divisible
    from pipelines.checkpoint import Checkpoint
    from pipelines.loading import resolve_dtype

    if options.num_ranks < 1:
        raise ValueError(f"--ranks is {options.num_ranks}; it must be at least 1")
    on_cpu = options.measure and not _has_gpus(options.num_ranks)
    dtype = resolve_dtype(options.dtype, torch.device("cpu") if on_cpu else torch.device("cuda"))
    checkpoint = Checkpoint.of_configuration(options.model, "cpu", dtype)
    model, request = checkpoint.weightless(), options.request(checkpoint.defaults)
    check_divisible(model, "one that fits", options.num_ranks)
    if not checkpoint.spec.has_known_conditioning:
        weights = [weight for module in model.modules.values() for weight in module.parameters()]
        return WeightsAlone(
            model=options.model,
            dtype=dtype,
            num_parameters=sum(weight.numel() for weight in weights),
            weight_bytes=sum(weight.nbytes for weight in weights),
        )
    counted = profile(model)
    machine, origin = find_machine(options, counted)
    work = workload(model, checkpoint.largest_step(request))
    return Estimate(
        request=request,
        dtype=dtype,
        forecast=forecast(counted, work, options.num_ranks, machine, options.precision),
        origin=origin,
    )


def find_machine(options: EstimateOptions, counted: ModelProfile) -> tuple[Machine, str]:
    """Figures, and where they come from: as asked for; measured before; measured now; or a known machine's."""
    from engines.planner.machine import Machine
    from engines.planner.machines import MACHINES

    if options.machine is not None:
        if options.machine in MACHINES:
            return MACHINES[options.machine], f"the known machine {options.machine}"
        return _read(Path(options.machine)), options.machine
    kind = "cuda" if _has_gpus(options.num_ranks) else "cpu"
    kept = kept_file(counted, kind, options.num_ranks)
    if options.measure or (kind == "cuda" and not kept.is_file()):
        return _measure(counted, options.num_ranks, kind, kept), f"measured now, kept in {kept}"
    if kept.is_file():
        return Machine.from_json(kept.read_text()), f"measured before, kept in {kept}"
    return MACHINES[PAPER_MACHINE], f"the known machine {PAPER_MACHINE}; --measure takes this one's figures"


def kept_file(counted: ModelProfile, kind: str, num_ranks: int) -> Path:
    """Where a measurement is kept. It was made with a model's sizes, so they are part of its name."""
    dtype = str(counted.dtype).removeprefix("torch.")
    return Settings().data_dir / "machines" / f"{kind}x{num_ranks}_{counted.num_heads}x{counted.head_dim}_{dtype}.json"


def print_estimate(options: EstimateOptions, *, as_json: bool) -> None:
    estimate = make_estimate(options)
    if isinstance(estimate, WeightsAlone):
        document, lines = estimate.document(), estimate.lines()
    else:
        document, lines = document_of(options, estimate), lines_of(options, estimate)
    if as_json:
        print(json.dumps(document, indent=1))
    else:
        console.print("\n".join(lines), soft_wrap=True)


def lines_of(options: EstimateOptions, estimate: Estimate) -> list[str]:
    request, step = estimate.request, estimate.forecast
    frames = f", {request.num_frames} frames" if request.num_frames > 1 else ""
    tokens = " + ".join(f"{number} {stream}" for stream, number in step.work.lengths)
    return [
        f"{options.model}, {request.width}x{request.height}{frames}, {_name(estimate.dtype)}, linears {step.precision}",
        f"tokens: {tokens}; branches: {step.work.num_branches}; ranks: {options.num_ranks}; times are predicted",
        step.table(),
        step.machine.describe(),
        f"figures: {estimate.origin}",
    ]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def document_of(options: EstimateOptions, estimate: Estimate) -> dict[str, Any]:
    """The same for programs."""
    step = estimate.forecast
    candidates = [
        {name: value for name, value in asdict(cost).items() if name != "spec"}
        | {"strategy": cost.spec.name, "total_ms": cost.total_ms}
        for cost in step.costs
    ]
    return {
        "model": options.model,
        "size": f"{estimate.request.width}x{estimate.request.height}",
        "num_frames": estimate.request.num_frames,
        "num_ranks": options.num_ranks,
        "dtype": _name(estimate.dtype),
        "precision": step.precision,
        "tokens": dict(step.work.lengths),
        "num_branches": step.work.num_branches,
        "candidates": candidates,
        "chosen": step.chosen.spec.name,
        "reason": step.reason(),
        "machine": asdict(step.machine),
        "origin": estimate.origin,
    }


def _has_gpus(num_ranks: int) -> bool:
    import torch

    return torch.cuda.device_count() >= num_ranks


def _measure(counted: ModelProfile, num_ranks: int, kind: str, kept: Path) -> Machine:
    from engines.planner.measure_here import measure_here

    machine = measure_here(counted, num_ranks, kind)
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(machine.to_json())
    return machine


def _read(file: Path) -> Machine:
    from engines.planner.machine import Machine
    from engines.planner.machines import MACHINES

    if not file.is_file():
        raise ValueError(f"--machine {file} is no file, and no known machine; known: {', '.join(MACHINES)}")
    try:
        return Machine.from_json(file.read_text())
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} holds no machine's figures ({error!r}); --measure makes such a file") from error
