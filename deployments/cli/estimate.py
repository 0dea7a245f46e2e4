"""``troupe estimate``: prints an estimate as lines, or as a JSON document."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from deployments.sizing.estimate import (
    Estimate,
    EstimateOptions,
    WeightsAlone,
    budgets_of,
    make_estimate,
    tokens_by_stream,
)
from deployments.sizing.fit import GIB, Fit, RequestTimes
from deployments.sizing.savings import Budget
from pipelines.libraries import quiet_libraries

if TYPE_CHECKING:
    import torch

    from engines.planner.machine import Machine
    from pipelines.blocks.footprint import Footprint
    from pipelines.request import MediaRequest


def print_estimate(options: EstimateOptions, *, as_json: bool) -> None:
    with quiet_libraries():
        estimate = make_estimate(options)
    if isinstance(estimate, WeightsAlone):
        document, lines = _weights_document(estimate), _weights_lines(estimate)
    else:
        document, lines = _document(options, estimate), _lines(options, estimate)
    print(json.dumps(document, indent=1) if as_json else "\n".join(lines))


def _weights_lines(found: WeightsAlone) -> list[str]:
    weights = f"{found.num_parameters / 1e9:.1f} B parameters, {found.weight_bytes / GIB:.1f} GiB on the one rank"
    return [f"{found.model}, {_name(found.dtype)}: {weights}", found.sentence, f"no time: {found.reason}"]


def _weights_document(found: WeightsAlone) -> dict[str, Any]:
    """Return a JSON object with the keys of ``_document``, without candidates."""
    weights = {"num_parameters": found.num_parameters, "weight_bytes": found.weight_bytes}
    weights |= {"total_bytes": found.total_bytes, "memory_bytes": found.memory_bytes}
    model = {"model": found.model, "num_ranks": 1, "dtype": _name(found.dtype)}
    return {**model, **weights, "candidates": [], "chosen": None, "reason": found.reason}


def _lines(options: EstimateOptions, estimate: Estimate) -> list[str]:
    request, step = estimate.request, estimate.forecast
    frames = f", {request.num_frames} frames" if request.num_frames > 1 else ""
    tokens = tokens_by_stream(dict(step.work.lengths))
    return [
        f"{options.model}, {request.width}x{request.height}{frames}, {_name(estimate.dtype)}, linears {step.precision}"
        f"{_attention(options, step.machine)}",
        *_times_lines(estimate.times, request),
        *_fit_lines(estimate.fit, estimate.parts),
        *(f"{name}: {_budget_line(budget)}" for name, budget in budgets_of(options, estimate).items()),
        *(cost.sentence for cost in estimate.inputs),
        f"tokens: {tokens}; branches: {step.work.num_branches}; ranks: {options.num_ranks}; times are predicted",
        step.table(),
        step.machine.describe(),
        f"figures: {estimate.origin}",
    ]


def _times_lines(times: RequestTimes, request: MediaRequest) -> list[str]:
    what = "picture" if request.kind == "image" or request.num_frames == 1 else "clip"
    steps = f"{times.num_steps} steps x {1e3 * times.step_s:.1f} ms"
    if times.second_num_steps:
        steps += f" + {times.second_num_steps} steps x {1e3 * times.second_step_s:.1f} ms"
    encode = "" if times.encode_s is None else f"encode {times.encode_s:.2f} s + "
    decode = "" if times.decode_s is None else f" + decode {times.decode_s:.2f} s (within a factor of two)"
    return [
        f"one {what}: {times.total_s:.2f} s = {encode}{steps}{decode}",
        f"not counted: {', '.join(times.not_counted)}",
    ]


def _fit_lines(fit: Fit, found: Footprint) -> list[str]:
    shown = (f"{name} {'?' if size is None else f'{size:.1f}'}" for name, size in fit.gib(found).items())
    asleep = f"asleep (share): {fit.host_bytes / GIB:.1f} GiB of pinned host memory, awake in {fit.wake_s:.2f} s; "
    asleep += "what exceeds host_memory_gib of the share is read through the page cache, slower"
    return [f"GiB on the first GPU: {', '.join(shown)}", fit.sentence(), asleep]


def _budget_line(budget: Budget | str) -> str:
    return budget if isinstance(budget, str) else f"memory_gib: {budget.memory_gib:g} chooses {budget.sentence()}"


def _attention(options: EstimateOptions, machine: Machine) -> str:
    """Return what is said about attention: nothing if it is in the model's dtype, and was timed so."""
    if options.attention == machine.attention_precision:
        return "" if options.attention == "auto" else f", attention {options.attention}"
    return f", attention {options.attention} (its time is that of {machine.attention_precision}: no other is known)"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _document(options: EstimateOptions, estimate: Estimate) -> dict[str, Any]:
    """Return the estimate as a JSON object."""
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
        "attention": options.attention,
        "tokens": dict(step.work.lengths),
        "num_branches": step.work.num_branches,
        "inputs": [asdict(cost) for cost in estimate.inputs],
        "request": estimate.times.document(),
        "memory": estimate.fit.document(estimate.parts),
        "budgets": {
            name: {"error": budget} if isinstance(budget, str) else budget.document()
            for name, budget in budgets_of(options, estimate).items()
        },
        "candidates": candidates,
        "chosen": step.chosen.spec.name,
        "reason": step.reason(),
        "machine": asdict(step.machine),
        "origin": estimate.origin,
    }
