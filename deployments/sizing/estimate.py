"""Seconds of a picture or clip, memory of all parts, and the cost of each strategy, from configurations only.

The chosen strategy is that of ``strategy: auto`` for the same machine and step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deployments.settings import Settings
from deployments.sizing.fit import GIB, Fit, OtherPass, RequestTimes, StageMemory, usual_limit_gib, with_memory
from deployments.sizing.savings import Budget, BudgetRules, choose_savings

if TYPE_CHECKING:
    import torch

    from engines.core.model import DenoiserModel
    from engines.planner.forecast import StepForecast
    from engines.planner.machine import Machine
    from engines.planner.profile import ModelProfile
    from pipelines.blocks.footprint import Footprint
    from pipelines.checkpoint import Checkpoint
    from pipelines.defaults import Defaults
    from pipelines.request import MediaRequest
    from pipelines.size import Size


PAPER_MACHINE = "h200"
USUAL_MACHINES = ("rtx-4090", "l40s", "h100", "h200")
"""Machines whose figures predict costs for a size of memory if no GPU is here, smallest first."""
DRIVER_FOLDER = Path("/proc/driver/nvidia/gpus")
"""Folder in which NVIDIA's driver describes each GPU. A process that asks CUDA would take memory of it."""
GUIDED = 2.0
"""Any scale above 1, which gives a step its second branch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EstimateOptions:
    """Options of the command line; None is the model's or the machine's own value."""

    model: str
    """A folder, hub id, or published model's name."""
    num_ranks: int
    """Ranks of the gang."""
    size: str | None = None
    """WIDTHxHEIGHT."""
    num_frames: int | None = None
    """Length of a clip."""
    guided: bool | None = None
    """True if there is classifier-free guidance."""
    dtype: str = "auto"
    """Dtype of the weights; "auto" is bfloat16."""
    precision: str = "native"
    """Precision of the linears."""
    attention: str = "auto"
    """Precision of attention."""
    machine: str | None = None
    """Name of a known machine, or a file of a measurement."""
    measure: bool = False
    """Measure this machine instead of taking known figures."""
    num_steps: int | None = None
    """Solver steps."""
    memory_gib: float | None = None
    """Memory of each GPU."""
    second_stage_sigmas: tuple[float, ...] = ()
    """Noise levels of a second pass over the latents, of which ``size`` is the size; empty: there is one pass."""

    def wanted_size(self, defaults: Defaults) -> Size:
        from pipelines.size import Size

        if self.second_stage_sigmas and defaults.stage_scale:
            defaults = defaults.enlarged
        size = Size.parse(self.size) if self.size else Size(width=defaults.width, height=defaults.height)
        return size if self.num_frames is None else replace(size, num_frames=self.num_frames)

    def request(self, defaults: Defaults, **inputs: Any) -> MediaRequest:
        """Return the request of the options; ``inputs`` are fields of input pictures and clips."""
        from pipelines.request import SecondStage

        guided = defaults.true_cfg_scale > 1 if self.guided is None else self.guided
        scale = max(defaults.true_cfg_scale, GUIDED) if guided else 1.0
        steps: dict[str, Any] = {} if self.num_steps is None else {"num_inference_steps": self.num_steps}
        if self.second_stage_sigmas:
            steps["second_stage"] = SecondStage(scale=defaults.stage_scale, sigmas=self.second_stage_sigmas)
        avoided = "" if guided else None  # some models have guidance beside a negative prompt only
        return defaults.request(
            self.wanted_size(defaults), true_cfg_scale=scale, negative_prompt=avoided, **steps, **inputs
        )


def tokens_by_stream(lengths: Mapping[str, int]) -> str:
    """Return the number of tokens of each stream; of a model's only stream, the number alone."""
    if len(lengths) == 1:
        return str(*lengths.values())
    return " + ".join(f"{number} {stream}" for stream, number in lengths.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class InputCost:
    """The largest step of a request with pictures or a clip, whose tokens are beside those of the result."""

    name: str
    """The pictures or the clip, in words."""
    tokens: Mapping[str, int]
    """Tokens of the step by stream, with theirs."""
    step_ms: float
    """Predicted time of the step."""
    rank_bytes: int
    """Memory of each rank."""

    @property
    def sentence(self) -> str:
        costs = f"{self.step_ms:.1f} ms a step, {self.rank_bytes / GIB:.1f} GiB a rank"
        return f"with {self.name}: {tokens_by_stream(self.tokens)} tokens, {costs}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Times and memory of one request on one machine."""

    request: MediaRequest
    """Request that is estimated."""
    dtype: torch.dtype
    """Dtype of the weights."""
    forecast: StepForecast
    """Costs of a step by every way to divide it."""
    origin: str
    """Source of the machine's figures."""
    parts: Footprint
    """Parts beside the transformer."""
    fit: Fit
    """Memory of the fullest GPU."""
    times: RequestTimes
    """Seconds of the stages."""
    inputs: tuple[InputCost, ...]
    """Costs of optional pictures and clips that add tokens to a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsAlone:
    """Memory on one rank of a model whose steps are unknown before a request."""

    model: str
    """The model's name."""
    dtype: torch.dtype
    """Dtype of the weights."""
    num_parameters: int
    """Parameters of the transformers."""
    weight_bytes: int
    """Bytes of the transformers."""
    parts: Footprint
    """Parts beside the transformer."""
    memory_bytes: int
    """Memory of the GPU."""

    @property
    def total_bytes(self) -> int:
        """Memory of weights and processes on one GPU."""
        parts = replace(self.parts, compiled_bytes=0)
        return StageMemory.of(parts, limits=False, usual_limit_gib=0).fullest_bytes(self.weight_bytes)

    @property
    def sentence(self) -> str:
        fits = "fit" if self.total_bytes < self.memory_bytes else "do not fit"
        unknown = f" (without {', '.join(self.parts.unknown)}, of unknown size)" if self.parts.unknown else ""
        needs = f"weights of all parts and their processes take {self.total_bytes / GIB:.1f} GiB{unknown}"
        return f"{needs} and {fits} {self.memory_bytes / GIB:.1f} GiB; the memory of a step is not known"

    @property
    def reason(self) -> str:
        return f"a step of {self.model} is not known before there is a request"


def make_estimate(options: EstimateOptions) -> Estimate | WeightsAlone:
    """Return the estimate, from configurations only. ValueError if the model or the machine does not allow it."""
    return estimate_of(options, open_model(options))


def open_model(options: EstimateOptions) -> Checkpoint:
    """Return the checkpoint of ``options``, without weights. ValueError for options that no model allows."""
    import torch

    from engines.core.spec import check_attention_choice
    from pipelines.checkpoint import Checkpoint
    from pipelines.loading import resolve_dtype

    check_attention_choice(options.attention)
    if options.num_ranks < 1:
        raise ValueError(f"--ranks is {options.num_ranks}; it must be at least 1")
    on_cpu = options.measure and not _has_gpus(options.num_ranks)
    dtype = resolve_dtype(options.dtype, torch.device("cpu") if on_cpu else torch.device("cuda"))
    return Checkpoint.of_configuration(options.model, "meta", dtype)


def estimate_of(options: EstimateOptions, checkpoint: Checkpoint) -> Estimate | WeightsAlone:
    """Return the estimate for ``checkpoint``, from ``open_model``. ValueError as for ``make_estimate``."""
    from engines.torch_engine.config import check_divisible

    model, request = checkpoint.weightless(), options.request(checkpoint.defaults)
    check_divisible(model, "one that fits", options.num_ranks)
    parts = checkpoint.footprint(request)
    if checkpoint.spec.has_known_conditioning:
        return _estimate(options, checkpoint, model, request, parts)
    weights = [weight for module in model.modules.values() for weight in module.parameters()]
    return WeightsAlone(
        model=options.model,
        dtype=checkpoint.dtype,
        num_parameters=sum(weight.numel() for weight in weights),
        weight_bytes=sum(weight.nbytes for weight in weights),
        parts=parts,
        memory_bytes=_named_or_read(options.machine or PAPER_MACHINE, options.memory_gib).memory_bytes,
    )


def _estimate(
    options: EstimateOptions, checkpoint: Checkpoint, model: DenoiserModel, request: MediaRequest, parts: Footprint
) -> Estimate:
    from engines.planner.forecast import forecast, workload
    from engines.planner.profile import profile

    counted = profile(model)
    machine, origin = find_machine(options, counted)
    machine = with_memory(machine.for_ranks(options.num_ranks), options.memory_gib)
    works = [workload(model, checkpoint.largest_step(one)) for one in request.stages]
    plan = partial(forecast, counted, num_ranks=options.num_ranks, machine=machine, precision=options.precision)
    step = max((plan(work, must_fit=False) for work in works), key=lambda one: one.chosen.memory_bytes)
    weights = step.chosen.spec
    steps = [step if work is step.work else plan(work, same_weights=weights, must_fit=False) for work in works]
    numbers = [checkpoint.num_steps(one) for one in request.stages]
    others = [OtherPass(work=one, num_steps=n) for one, n in zip(works, numbers, strict=True) if one is not step.work]
    usual_gib = usual_limit_gib(options.num_ranks)
    beside = StageMemory.of(parts, limits=_limits_decodes(checkpoint), usual_limit_gib=usual_gib)
    return Estimate(
        request=request,
        dtype=checkpoint.dtype,
        forecast=step,
        origin=origin,
        parts=parts,
        fit=Fit(
            step=step,
            num_ranks=options.num_ranks,
            parts=beside,
            unknown=parts.unknown,
            other_pass=others[0] if others else None,
        ),
        times=RequestTimes.of(parts, machine, request, numbers, [one.chosen.total_ms for one in steps]),
        inputs=tuple(_input_costs(options, checkpoint, model, step)),
    )


def _input_costs(
    options: EstimateOptions, checkpoint: Checkpoint, model: DenoiserModel, step: StepForecast
) -> Iterator[InputCost]:
    """Yield the cost of each kind of input, under the strategy that was chosen without it."""
    from engines.planner.cost_model import predict
    from engines.planner.forecast import workload

    defaults = checkpoint.defaults
    for name, fields in defaults.inputs(options.wanted_size(defaults)):
        try:
            request = options.request(defaults, **fields)
        except ValueError:  # the result cannot have this input: a picture at a frame that is not there
            continue
        work = workload(model, checkpoint.largest_step(request))
        if sum(dict(work.lengths).values()) > sum(dict(step.work.lengths).values()):
            cost = predict(step.counted, work, step.chosen.spec, step.machine, step.precision)
            yield InputCost(name=name, tokens=dict(work.lengths), step_ms=cost.total_ms, rank_bytes=cost.memory_bytes)


def budgets_of(options: EstimateOptions, estimate: Estimate) -> dict[str, Budget | str]:
    """Return what ``memory_gib`` would choose, without and with ``allow_quantization``, or why nothing fits.

    Empty without a size of memory.
    """
    if options.memory_gib is None:
        return {}
    others = tuple(name for name in estimate.fit.machine.quantised if name != options.precision)
    found: dict[str, Budget | str] = {}
    for name, precisions in (("lossless", ()), ("allow_quantization", others)):
        rules = BudgetRules(precisions=(options.precision, *precisions))
        try:
            found[name] = choose_savings(estimate.fit, estimate.times, options.memory_gib, rules)
        except ValueError as error:
            found[name] = str(error)
    return found


def _limits_decodes(checkpoint: Checkpoint) -> bool:
    """Return whether the decoder supports ``memory_gib``."""
    from pipelines.preconditions import decoder_problems

    return not list(decoder_problems(checkpoint.path, compiled=False, limits_memory=True, num_devices=1))


def machine_like(memory_gib: float) -> str:
    """Return the known machine of this host's first GPU; without one, the usual one with ``memory_gib``."""
    from engines.planner.machine import MACHINES

    name = gpu_name().lower()
    if here := [key for key in MACHINES if key.replace("-", " ") in name]:
        return max(here, key=len)
    large = (key for key in USUAL_MACHINES if MACHINES[key].memory_bytes >= 0.9 * memory_gib * GIB)
    return next(large, USUAL_MACHINES[-1])


def gpu_name() -> str:
    """Return the driver's name of this host's first GPU, without CUDA; empty without a GPU."""
    for file in sorted(DRIVER_FOLDER.glob("*/information")):
        for line in file.read_text().splitlines():
            key, _, value = line.partition(":")
            if key == "Model":
                return value.strip()
    return ""


def find_machine(options: EstimateOptions, counted: ModelProfile) -> tuple[Machine, str]:
    """Return figures and their source: the option, an earlier measurement, a new one, or a known machine.

    With ``memory_gib`` they are those by which a server chooses savings.
    """
    from engines.planner.machine import MACHINES, Machine

    if options.machine is not None:
        is_known = options.machine.lower() in MACHINES
        return _named_or_read(options.machine), f"the known machine {options.machine}" if is_known else options.machine
    if options.memory_gib is not None and not options.measure:
        name = machine_like(options.memory_gib)
        return MACHINES[name], f"the known machine {name}, by which a server chooses savings; --machine names another"
    kind = "cuda" if _has_gpus(options.num_ranks) else "cpu"
    file = measurement_file(counted, kind, options.num_ranks, options.attention)
    if options.measure or (kind == "cuda" and not file.is_file()):
        return _measure(counted, options, kind, file), f"measured now, kept in {file}"
    if file.is_file():
        return Machine.from_json(file.read_text()), f"measured before, kept in {file}"
    return MACHINES[PAPER_MACHINE], f"the known machine {PAPER_MACHINE}; --measure takes this one's figures"


def _named_or_read(name: str, memory_gib: float | None = None) -> Machine:
    from engines.planner.machine import MACHINES

    return with_memory(MACHINES.get(name.lower()) or _read(Path(name)), memory_gib)


def measurement_file(counted: ModelProfile, kind: str, num_ranks: int, attention: str = "auto") -> Path:
    """Return the file of a measurement, named by the model's sizes that it was made with."""
    dtype = str(counted.dtype).removeprefix("torch.")
    name = f"{kind}x{num_ranks}_{counted.num_heads}x{counted.head_dim}_{dtype}"
    name = name if attention == "auto" else f"{name}_attention_{attention}"
    return Settings().data_dir / "machines" / f"{name}.json"


def _has_gpus(num_ranks: int) -> bool:
    import torch

    return torch.cuda.device_count() >= num_ranks


def _measure(counted: ModelProfile, options: EstimateOptions, kind: str, file: Path) -> Machine:
    from engines.planner.measure import measure_here

    machine = measure_here(counted, options.num_ranks, kind, options.attention)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(machine.to_json())
    return machine


def _read(file: Path) -> Machine:
    from engines.planner.machine import MACHINES, Machine

    if not file.is_file():
        raise ValueError(f"--machine {file} is no file, and no known machine; known: {', '.join(MACHINES)}")
    try:
        return Machine.from_json(file.read_text())
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} holds no machine's figures ({error!r}); --measure makes such a file") from error
