"""Concrete choices of the PyTorch engine for a model on a device, and the division of a gang's steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engines.core.model import DenoiserModel, dtype_of
from engines.core.spec import ParallelSpec, scheme_of
from engines.parallel.division import TeamSpecs
from engines.parallel.mesh import Groups
from engines.parallel.offload import offloaded_weights
from engines.parallel.pipeline import pipeline_blocks
from engines.parallel.tensor import split_features
from engines.planner.auto import choose_specs, possible_team_sizes
from engines.planner.measure import smallest_memory_bytes
from engines.planner.step_cost import MemoryFloor
from engines.torch_engine.exchange.choose import ExchangeRules
from engines.torch_engine.options import TorchOptions

FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchChoices:
    """Concrete values of all options that may be "auto"."""

    precision: str = "native"
    """Precision of the linears (see ``engines.core.spec``)."""
    attention: str = "auto"
    """Precision of attention (see ``engines.core.spec``)."""
    calibration: Path | None = None
    """File of ``troupe calibrate``, for static scales; None of other precisions."""
    compile_blocks: bool = False
    """Compile the module's blocks, where the module runs."""
    fast: bool = False
    """Run the family's hand-ordered step where a team allows it, else the module."""
    capture: bool = False
    """Record each shape in a CUDA graph at its second step."""
    exchange: ExchangeRules = field(default_factory=ExchangeRules)
    """The default until steps are timed."""
    prompt_windows: bool = False
    """See ``TorchOptions``."""
    offloaded_blocks: int = 0
    """See ``TorchOptions``. Blocks are not compiled, and steps neither hand-ordered nor captured."""
    originals_on_host: bool = False
    """See ``TorchOptions``."""


def resolve(
    model: DenoiserModel,
    device: torch.device,
    *,
    precision: str,
    options: TorchOptions,
    attention: str = "auto",
    compiled: bool | None = None,
    fast: bool | None = None,
    capture: bool = True,
) -> TorchChoices:
    """Return concrete choices for a model on a device. ``ValueError`` if they are impossible.

    Blocks are ``compiled``, and steps ``fast``, on CUDA by default. On the CPU compiled blocks were slower than eager
    ones, and took 20 s per shape. With offloaded blocks, steps are eager.
    """
    on_gpu = device.type == "cuda"
    if precision not in ("auto", "native") and not model.plan.linears:
        raise ValueError(
            f"precision is {precision!r}, and no linears of this model can be quantised: its shard plan names none; "
            "leave it out"
        )
    if options.offloaded_blocks:
        compiled, fast, capture = False, False, False
    if on_gpu and scheme_of(precision) == "fp8":
        _check_capability(precision, device)
    has_fast = model.fast is not None and model.weights is None and precision in ("auto", "native", "fp8")
    wants_fast = on_gpu and model.head_dim.bit_count() == 1 if fast is None else fast  # kernels need powers of two
    if options.originals_on_host and has_fast and wants_fast:
        raise ValueError(
            "torch.originals_on_host is for models whose steps change weights in place, and this model's hand-ordered "
            "step has copies of its own: leave it out"
        )
    return TorchChoices(
        precision="native" if precision == "auto" else precision,
        attention=attention,
        calibration=options.calibration,
        compile_blocks=on_gpu if compiled is None else compiled,
        fast=has_fast and wants_fast,
        capture=capture and on_gpu,
        exchange=usual_exchange(options),
        prompt_windows=options.prompt_windows,
        offloaded_blocks=options.offloaded_blocks,
        originals_on_host=options.originals_on_host,
    )


def usual_exchange(options: TorchOptions) -> ExchangeRules:
    """Return the rules for exchanging heads without timed steps."""
    return ExchangeRules(peer_memory=options.peer_memory is not False)


def divide(
    model: DenoiserModel,
    strategy: str | TeamSpecs,
    *,
    rank: int,
    num_ranks: int,
    device: torch.device,
    groups: Groups,
    precision: str,
    attention: str = "auto",
    originals_on_host: bool = False,
) -> TeamSpecs:
    """Return the divisions of a model's steps over a gang. All ranks make the call. ``ValueError`` if there are none.

    ``precision`` is concrete: strategy "auto" is predicted for it.
    """
    if isinstance(strategy, TeamSpecs):
        return strategy
    check_divisible(model, strategy, num_ranks)
    if strategy != "auto":
        return TeamSpecs.of_sizes(possible_team_sizes(model, num_ranks), lambda size: _named(model, strategy, size))
    scheme = scheme_of(precision) or "native"  # the precisions that machines are measured in
    gang: dict[str, Any] = {"rank": rank, "num_ranks": num_ranks, "groups": groups}
    how: dict[str, Any] = {"precision": scheme, "attention": attention, "originals_on_host": originals_on_host}
    return choose_specs(model, device=device, **how, **gang)


def check_divisible(model: DenoiserModel, strategy: str, num_ranks: int) -> None:
    """Raise ``ValueError`` if the model cannot be divided over the ranks, or "auto" has no step to choose by."""
    model.check_planned(num_ranks)
    if num_ranks > 1 and strategy == "auto" and not model.probe():
        raise ValueError("strategy 'auto' needs a step to choose by, and none is known: name one, such as 'ulysses'")


def _named(model: DenoiserModel, strategy: str, team_size: int) -> tuple[ParallelSpec, ...]:
    specs = ParallelSpec.of(strategy, team_size).by_branches(keep_weights=model.weights is not None)
    for spec in reversed(specs):
        check_spec(model, spec)
    return specs


def check_spec(model: DenoiserModel, spec: ParallelSpec) -> None:
    """Raise ``ValueError``, with the numbers, if the model cannot be divided so."""
    spec.check(
        num_heads=model.num_heads,
        has_tensor_plan=bool(model.plan.linears),
        num_blocks=min(len(pipeline_blocks(module, model.plan)) for module in model.modules.values()),
        features=split_features(next(iter(model.modules.values())), model.plan) if spec.tensor > 1 else None,
    )


def memory_floor(model: DenoiserModel, precision: str, num_offloaded: int = 0) -> MemoryFloor:
    """Return the steps' least memory and the smallest rank's, equal on all ranks, which all make the call.

    Quantised weights count one byte each, those of offloaded blocks none.
    """
    modules = model.modules.values()
    dtype_bytes = dtype_of(next(iter(modules))).itemsize
    weight_bytes = sum(_held_bytes(module, model, num_offloaded) for module in modules)
    hoisted_per_token = min((model.hoisted_features.get(name, 0) for name in model.plan.streams), default=0)
    return MemoryFloor(
        available_bytes=smallest_memory_bytes(model.device),
        weight_bytes=weight_bytes if precision == "native" else weight_bytes // dtype_bytes,
        token_bytes=model.num_heads * model.head_dim * dtype_bytes,
        hoisted_token_bytes=hoisted_per_token * dtype_bytes,
    )


def _held_bytes(module: nn.Module, model: DenoiserModel, num_offloaded: int) -> int:
    elsewhere = offloaded_weights(module, model.plan, num_offloaded) if num_offloaded else ()
    return sum(weight.nbytes for name, weight in module.named_parameters() if name not in elsewhere)


def _check_capability(precision: str, device: torch.device) -> None:
    capability = torch.cuda.get_device_capability(device)
    if capability < FP8_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise ValueError(
            f"precision {precision!r} needs a GPU of compute capability 8.9 or later (Ada, Hopper); "
            f"{name} has {capability[0]}.{capability[1]}: use 'native' or 'int8'"
        )
