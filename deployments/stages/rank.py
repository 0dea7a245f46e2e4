"""What each rank of a gang builds at start: the family's denoiser inside an engine, and its sampler."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from deployments.config import DenoiserConfig, ModelConfig
from engines.core.rank import RankContext
from engines.gang.config import RankParts
from pipelines.family import Family

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildRankParts:
    """A ``BuildRank``. Travels to the ranks by pickling, so it holds configuration only; imports happen there."""

    model: ModelConfig

    def __call__(self, context: RankContext) -> RankParts:
        import torch

        from deployments.observability.logs import configure_logs
        from engines.registry import load_engine
        from engines.warm_up import warm_up
        from pipelines.loading import resolve_dtype, resolve_path
        from pipelines.registry import load_family
        from pipelines.sizes import first_step, request_of, steps_ahead
        from pipelines.sliced import load_sliced

        configure_logs()
        device = torch.device(context.device)
        path, dtype = resolve_path(self.model.source), resolve_dtype(self.model.dtype, device)
        family = load_family(path)
        config = self.model.denoiser
        default = first_step(family, path, request_of(None, family.defaults(path)), device, dtype)[0]
        load = partial(load_sliced, family) if is_sliced(config, family, path, device, dtype) else family.load_denoiser
        denoiser = load(path, device, dtype)
        denoiser = replace(denoiser, typical_lengths=denoiser.stream_lengths(default.inputs))
        steps = steps_ahead(family, path, config.warm_sizes, tuple(denoiser.modules), device, dtype)
        engine = load_engine(
            config.engine,
            denoiser,
            context,
            strategy=config.strategy,
            precision=config.precision,
            options=config.engine_options,
            expected=steps,
        )
        warm_up(engine, steps, context, engine.team_sizes if config.elastic else engine.team_sizes[-1:])
        return RankParts(engine=engine, sampler=family.load_sampler(path, device, dtype))


def is_sliced(config: DenoiserConfig, family: Family, path: Path, device: torch.device, dtype: torch.dtype) -> bool:
    """What ``config.load`` means. ValueError if it asks for what its engine cannot do."""
    from engines.core.spec import ParallelSpec
    from engines.planner.cost_model import USABLE
    from engines.planner.measure import memory_bytes
    from pipelines.sliced import weights_bytes

    can_slice = config.engine != "tensorrt" and config.num_ranks > 1
    if config.load == "sliced" and not can_slice:
        raise ValueError(
            f"load: sliced needs the engine torch and several ranks, not {config.engine} on {config.num_ranks}"
        )
    if config.load != "auto" or not can_slice:
        return config.load == "sliced"
    if config.strategy != "auto":
        return ParallelSpec.of(config.strategy, config.num_ranks).divides_weights
    return weights_bytes(family, path, dtype) > USABLE * memory_bytes(device)
