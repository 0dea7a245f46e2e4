"""Models with ``memory_gib``: their configuration with the savings that make them fit.

The estimate takes seconds and needs torch, so only models with this key are estimated.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from deployments.config import AppConfig
from deployments.model_config import ModelConfig, check_sleeping
from deployments.sizing.estimate import Estimate, EstimateOptions, estimate_of, machine_like, open_model
from deployments.sizing.fit import APART, ON_CPU, SHARED, TURNS, Fit, RequestTimes
from deployments.sizing.savings import Budget, BudgetRules, choose_savings, extra_s_of
from engines.core.spec import scheme_of
from pipelines.libraries import quiet_libraries
from pipelines.size import Size

if TYPE_CHECKING:
    from pipelines.checkpoint import Checkpoint

logger = logging.getLogger("troupe.memory")


def applied(budget: Budget, model: ModelConfig) -> ModelConfig:
    """Return ``model`` with the savings of ``budget``."""
    document = model.model_dump()
    for saving in budget.savings:
        *sections, name = saving.key.split(".")
        section = document
        for each in sections:
            section[each] = section[each] or {}
            section = section[each]
        section[name] = saving.value
    return ModelConfig.model_validate(document)


def rules_for(model: ModelConfig, quantised: Iterable[str]) -> BudgetRules:
    """Return what the configuration of ``model`` allows on a GPU with rates for the ``quantised`` precisions."""
    denoiser = model.denoiser
    own = scheme_of(denoiser.precision) or "native"
    others = quantised if model.allow_quantization and denoiser.precision == "auto" else ()
    return BudgetRules(
        places=_places(model),
        precisions=(own, *(name for name in others if name != own)),
        strategy=denoiser.strategy,
        offloads=bool(denoiser.gpus_per_rank),
        num_offloaded=denoiser.num_offloaded,
        layers=_layers(model),
        originals=(True,) if denoiser.torch is not None and denoiser.torch.originals_on_host else (False, True),
    )


def _layers(model: ModelConfig) -> tuple[bool, ...]:
    """Return whether layers of the text encoder may be in host memory, the configured value first."""
    encoder = model.text_encoder
    if encoder.offloads_layers:
        return (True,)
    return (False, True) if encoder.num_gpus else (False,)


def _places(model: ModelConfig) -> tuple[str, ...]:
    """Return where the encoder may be, its configured place first."""
    encoder = model.text_encoder
    if model.stages == "together" or not model.denoiser.gpus_per_rank:
        return (SHARED,)
    if not encoder.num_gpus:
        return (ON_CPU,)
    if encoder.num_gpus >= 1:
        return (APART,)
    if encoder.takes_turns:
        return (TURNS,)
    return (SHARED, TURNS, ON_CPU) if _can_sleep(model) else (SHARED, ON_CPU)


def _can_sleep(model: ModelConfig) -> bool:
    """Return whether weights may sleep: the configuration allows it, and the package for GPUs is here."""
    try:
        check_sleeping(model)
    except ValueError:
        return False
    return find_spec("torch_memory_saver") is not None


def budget_of(model: ModelConfig) -> Budget:
    """Return the budget of a model with ``memory_gib``. ValueError if it does not fit, or its steps are unknown."""
    assert model.memory_gib is not None
    sizes = sorted(model.denoiser.warm_sizes, key=lambda size: size.width * size.height * (size.num_frames or 1))
    fit, times = _fit_of(model, sizes[-1] if sizes else None)
    return choose_savings(fit, times, model.memory_gib, rules_for(model, fit.machine.quantised))


def predicted_s(model: ModelConfig, budget: Budget, size: Size, num_steps: int) -> float:
    """Return the predicted seconds of a request with a new prompt to ``model`` with the savings of ``budget``.

    If a recipe has a second pass, and ``size`` allows one, its steps follow the ``num_steps`` of the first.
    """
    fit, times = _fit_of(model, size, num_steps)
    return times.total_s + extra_s_of(fit, times, rules_for(model, fit.machine.quantised), budget.savings)


def _second_stage_sigmas(model: ModelConfig, checkpoint: Checkpoint, size: Size | None) -> tuple[float, ...]:
    """Return the noise levels of a recipe's second pass; empty: no recipe has one, or no result of it has ``size``."""
    from deployments.stages.rank import second_stage_of

    second = second_stage_of(model, checkpoint) if model.recipes else None
    if second is None or not (size is None or checkpoint.defaults.has_second_stage(size)):
        return ()
    return second.sigmas


def _fit_of(model: ModelConfig, size: Size | None, num_steps: int | None = None) -> tuple[Fit, RequestTimes]:
    """Return the memory and the times of a request. ValueError if steps of ``model`` are unknown before one."""
    assert model.memory_gib is not None
    denoiser = model.denoiser
    options = EstimateOptions(
        model=model.source,
        num_ranks=denoiser.num_ranks,
        size=str(size) if size else None,
        dtype=model.dtype if denoiser.gpus_per_rank or model.dtype != "auto" else "float32",
        precision=scheme_of(denoiser.precision) or "native",
        machine=machine_like(model.memory_gib),
        num_steps=num_steps,
        memory_gib=model.memory_gib,
    )
    with quiet_libraries():
        checkpoint = open_model(options)
        sigmas = _second_stage_sigmas(model, checkpoint, size)
        estimate = estimate_of(replace(options, second_stage_sigmas=sigmas), checkpoint)
    if not isinstance(estimate, Estimate):
        raise ValueError(f"memory_gib is {model.memory_gib:g}, but {estimate.reason}: leave it out")
    return _with_adapters(_with_limit(estimate.fit, model), model), estimate.times


def _with_limit(fit: Fit, model: ModelConfig) -> Fit:
    """Return ``fit`` with the configured limit of decodes, and without a decoder if that is on CPU cores."""
    stage = model.text_encoder if model.stages == "together" else model.decoder
    if model.denoiser.gpus_per_rank and not stage.num_gpus:
        return replace(fit, parts=replace(fit.parts, decoder=0, compiled=0, decode=0, limited=0))
    if not (stage.num_gpus and model.decoder.compile):  # on a CPU it is compiled by Inductor, with its own weights
        fit = replace(fit, parts=replace(fit.parts, compiled=0))
    limited = fit.parts.limited if model.stages == "apart" else fit.parts.whole
    limit = model.decoder.memory_bytes
    decode = fit.parts.whole if limit is None else min(fit.parts.whole, limit)
    return replace(fit, parts=replace(fit.parts, decode=decode, limited=min(limited, decode)))


def _with_adapters(fit: Fit, model: ModelConfig) -> Fit:
    """Return ``fit`` with the loaded values of all blocks beside them if adapters change at run time."""
    if model.runtime_loras is None and not any(source.name for source in model.adapters):
        return fit
    counted = replace(fit.step.counted, changed_weight_bytes=fit.step.counted.block_weight_bytes)
    return replace(fit, step=replace(fit.step, counted=counted))


def with_budgets(args: AppConfig) -> tuple[AppConfig, dict[str, Budget]]:
    """Return the configuration with the savings of its models with ``memory_gib``, and these models' budgets.

    ValueError names a model that does not fit.
    """
    budgets: dict[str, Budget] = {}
    models: list[ModelConfig] = []
    for model in args.models:
        if model.memory_gib is not None:
            try:
                budgets[model.name] = budget = budget_of(model)
            except ValueError as error:
                raise ValueError(f"the model {model.name}: {error}") from error
            logger.info("memory of %s: %s", model.name, budget.sentence(), extra=budget.document())
            model = applied(budget, model)
        models.append(model)
    return args.model_copy(update={"models": tuple(models)}), budgets
