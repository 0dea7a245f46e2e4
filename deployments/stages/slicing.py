"""Whether each rank loads only its share of the weights, by the configuration alone."""

from __future__ import annotations

from deployments.stages.config import DenoiserConfig
from engines.core.spec import ParallelSpec


def must_slice(config: DenoiserConfig) -> bool | None:
    """Return what ``config.load`` means; None where that depends on the model's size and the machine's memory.

    ValueError if the engine cannot load slices.
    """
    can_slice = config.engine != "tensorrt" and config.num_ranks > 1
    if config.load == "sliced" and not can_slice:
        raise ValueError(
            f"load: sliced needs the engine torch and several ranks, not {config.engine} on {config.num_ranks}"
        )
    if config.load != "auto" or not can_slice:
        return config.load == "sliced"
    if config.strategy == "auto":
        return None
    return ParallelSpec.of(config.strategy, config.num_ranks).divides_weights
