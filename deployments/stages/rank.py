"""Start of a rank: load the checkpoint's denoiser into an engine, and its sampler."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from deployments.model_config import ModelConfig
from deployments.stages.devices import asleep_folder, host_lock
from deployments.stages.kernel_cache import shared_kernels, strategies_folder
from deployments.stages.measured_times import model_facts, software_facts
from deployments.stages.stage_config import DenoiserConfig, must_slice
from engines.core.engine import Choosing, RankContext
from engines.core.logs import log_phase, timed
from engines.core.model import Branch, DenoiserModel, Mix
from engines.core.resources import rank_resources
from engines.core.spec import scheme_of
from engines.gang.gang_config import BuildRank, RankParts
from pipelines.checkpoint import Checkpoint
from pipelines.libraries import quick_imports
from pipelines.lora.source import named
from pipelines.recipes import merged
from pipelines.request import SecondStage, mix_of

if TYPE_CHECKING:
    from engines.parallel.collectives import Axis
    from pipelines.lora.lora_cache import LoraCache


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadRankParts:
    """A ``LoadRank``, which is pickled: imports happen on the rank."""

    model: ModelConfig
    """Configuration of the model."""

    def __call__(self, context: RankContext) -> BuildRank:
        from deployments.observability.logs import configure_logs
        from engines.parallel.early_start import wait_for_first_exchanges

        configure_logs()
        config = self.model.denoiser
        with timed("rank: libraries", rank=context.rank), quick_imports():
            import_module("diffusers.pipelines.auto_pipeline")
        with timed("rank: checkpoint", rank=context.rank), quick_imports():  # beside the first exchanges
            checkpoint = self._checkpoint(context)
            is_sliced = slicing(config, checkpoint)
        with timed("rank: first exchanges", rank=context.rank):
            wait_for_first_exchanges()  # they must not overlap the copy of weights, which the first kernels may
        with timed("rank: weights", rank=context.rank), quick_imports():
            denoiser = self._denoiser(checkpoint, context, is_split=is_sliced())
        return partial(_build, self.model, context, checkpoint, denoiser)

    def _checkpoint(self, context: RankContext) -> Checkpoint:
        """Open the checkpoint. ValueError if the configuration does not suit it."""
        loras: dict[str, Any] = {"loras": self.model.adapters, "runtime_loras": self.model.runtime_loras}
        checkpoint = Checkpoint.open(self.model.source, context.device, self.model.dtype, **loras)
        eager_only = checkpoint.eager_only(is_split=self.model.denoiser.splits_tokens)
        self.model.denoiser.check_engine(self.model.dtype, eager_only=eager_only)  # before weights are read
        if problems := tuple(self.model.path_problems(checkpoint.spec)):
            raise ValueError("; ".join(problems))
        return checkpoint

    def _denoiser(self, checkpoint: Checkpoint, context: RankContext, *, is_split: bool) -> DenoiserModel:
        """Return the transformers, with weights that can sleep if the model shares its GPUs."""
        from engines.core.weight_memory import WeightMemory

        memory = rank_resources().get(WeightMemory)
        if self.model.sleeps:
            memory.open(context.device, asleep_folder())
        with memory.region():
            denoiser = checkpoint.denoiser(
                sliced=is_split,
                quantised=is_quantised(self.model.denoiser),
                num_offloaded=self.model.denoiser.num_offloaded,
                typical=checkpoint.defaults.request(),
                axis=reading_axis(self.model.denoiser, context),
            )
            beside = checkpoint.rank_parts()
        for module in (*denoiser.modules.values(), *beside):
            memory.hold(module)
        return denoiser


def _build(model: ModelConfig, context: RankContext, checkpoint: Checkpoint, denoiser: DenoiserModel) -> RankParts:
    from engines.parallel.early_start import wait_for_early_start

    with timed("rank: first kernels", rank=context.rank):
        early = wait_for_early_start()
    for part, took_s in early.items():
        log_phase(f"rank: early, {part}", took_s, rank=context.rank)
    with shared_kernels(model, f"rank_{context.rank}_of_{context.num_ranks}", context.device):
        return _make_engine(model, context, checkpoint, denoiser)


def _make_engine(
    model: ModelConfig, context: RankContext, checkpoint: Checkpoint, denoiser: DenoiserModel
) -> RankParts:
    from engines.core.model import with_attention
    from engines.registry import load_engine
    from engines.warm_up import release_unused_memory, warm_up, warm_up_additions

    config = model.denoiser
    start_s = time.monotonic()
    own, steps = checkpoint.own_engine(compiled=config.compile), _first_steps(model, checkpoint, denoiser)
    attentions = model.attentions[1:]
    engine = own or load_engine(
        config.engine,
        denoiser,
        context,
        strategy=config.strategy,
        precision=config.precision,
        attention=config.attention,
        attentions=attentions,
        options=config.engine_options,
        expected=steps,
        choosing=choosing_of(model, checkpoint),
    )
    log_phase("rank: engine", time.monotonic() - start_s, rank=context.rank)
    with timed("rank: warm up", rank=context.rank):
        shapes = tuple(with_attention(step, one) for step in steps for one in ("", *attentions))
        warm_up(engine, shapes, context, engine.team_sizes if config.elastic else engine.team_sizes[-1:])
    with timed("rank: warm up, adapters", rank=context.rank):
        warm_up_additions(engine, steps, recipe_mixes(model), tuple(range(context.num_ranks)))
    if model.memory_gib is not None:
        release_unused_memory(context.device)
    additions = cast("LoraCache", denoiser.additions) if denoiser.additions_change else None
    return RankParts(
        engine=engine,
        sampler=checkpoint.sampler(),
        estimates=engine.estimates,
        additions=additions,
        forwards=None if own is None else own.forwards,
    )


def _first_steps(model: ModelConfig, checkpoint: Checkpoint, denoiser: DenoiserModel) -> tuple[tuple[Branch, ...], ...]:
    """Return the steps of the warm-up."""
    config = model.denoiser
    if not checkpoint.spec.is_whole:
        return checkpoint.first_steps(
            config.warm_sizes,
            denoiser.modules,
            fills_prompts=config.fills_prompts,
            second_stage=second_stage_of(model, checkpoint),
        )
    return tuple(checkpoint.trial_steps(config.warm_sizes)) if config.compile else ()


def recipe_mixes(model: ModelConfig) -> tuple[Mix, ...]:
    """Return the additions to the weights that requests with the model's recipes ask for."""
    known = named(model.adapters)
    each = ((name, of) for name, one in model.recipes.items() for of in (one.loras, one.second_stage_loras))
    mixes = [mix_of(loras_of(name, known)) for name, loras_of in each]
    return tuple(filter(None, dict.fromkeys(mixes)))


def second_stage_of(model: ModelConfig, checkpoint: Checkpoint) -> SecondStage | None:
    """Return the second pass of the first of the model's recipes that has one."""
    recipes, scale = merged(model.recipes, checkpoint.recipes).values(), checkpoint.defaults.stage_scale
    each = (SecondStage(scale=scale, sigmas=sigmas) for recipe in recipes if (sigmas := recipe.second_stage_sigmas))
    return next(each, None)


def choosing_of(model: ModelConfig, checkpoint: Checkpoint) -> Choosing:
    """Return how "auto" is decided: on a default step, cached by model and software."""
    return Choosing(
        typical_step=checkpoint.typical_step,
        folder=strategies_folder(),
        name=model.name,
        facts={**model_facts(model, checkpoint.path), **software_facts()},
        every_team=model.denoiser.elastic,
        lock=host_lock(model.denoiser.gpus_per_rank),
    )


def is_quantised(config: DenoiserConfig) -> bool:
    """Return whether ranks replace the weights by quantised ones. TensorRT reads the original ones."""
    return config.engine == "torch" and scheme_of(config.precision) is not None


def reading_axis(config: DenoiserConfig, context: RankContext) -> Axis:
    """Return the ranks that read whole weights together with this one: those of its host, or itself alone."""
    from engines.parallel.collectives import Axis
    from engines.parallel.early_start import host_axis

    is_on = config.reading == "together" or (config.reading == "auto" and context.device != "cpu")
    is_alone = not is_on or context.num_ranks == context.num_hosts
    return Axis(ranks=(context.rank,), index=0) if is_alone else host_axis(context)


def slicing(config: DenoiserConfig, checkpoint: Checkpoint) -> Callable[[], bool]:
    """Return a function that says whether weights are loaded sliced, the same on all ranks.

    Ranks read and exchange weights together. Every rank calls the function, after the first exchanges. All that needs
    no other rank is done before. ValueError if the engine cannot load slices.
    """
    from engines.planner.cost_model import USABLE
    from engines.planner.measure import smallest_memory_bytes

    if (is_decided := must_slice(config)) is not None:
        return lambda: is_decided
    held_bytes = checkpoint.weights_bytes(quantised=is_quantised(config))
    originals_on_host = config.torch is not None and config.torch.originals_on_host
    switches = bool(named(checkpoint.loras)) or checkpoint.runtime_loras is not None
    if switches and not originals_on_host:  # adapters switch in the original weights
        held_bytes += checkpoint.weights_bytes()
    return lambda: held_bytes > USABLE * smallest_memory_bytes(checkpoint.device)
