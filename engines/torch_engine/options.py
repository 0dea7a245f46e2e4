"""Options of the PyTorch engine in a configuration. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engines.core.engine import EngineChoice
from engines.core.spec import PRECISIONS, ParallelSpec, check_attention_choice, check_known, is_static


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchOptions:
    """Options of one model."""

    calibration: Path | None = None
    """File of ``troupe calibrate``, for static scales."""
    peer_memory: bool | Literal["auto"] = "auto"
    """Ranks write into each other's memory if that works. False: NCCL alone. "auto": as timed steps decide."""
    offloaded_blocks: int = 0
    """Number of blocks of each transformer that stay in host memory. Each is copied to the device for its forward.
    Above 0, steps run eagerly."""
    originals_on_host: bool = False
    """Loaded values of weights that adapters change are in pinned host memory, from which each change copies them.
    For models without a hand-ordered step."""
    prompt_windows: bool = False
    """Hand-ordered steps pad prompts, so that many lengths share a captured step; attention gets a mask."""


def check(choice: EngineChoice) -> None:
    """Raise ``ValueError``, with the allowed values, if this engine does not support ``choice``."""
    options = choice.options or TorchOptions()
    assert isinstance(options, TorchOptions)
    check_known(choice.precision, PRECISIONS, "torch")
    for attention in (choice.attention, *choice.attentions):
        check_attention_choice(attention)
    if is_static(choice.precision) != (options.calibration is not None):
        raise ValueError(
            f"precision is {choice.precision!r} and torch.calibration {str(options.calibration)!r}: fp8-static and "
            "int8-static need a file that `troupe calibrate` wrote, and nothing else takes one"
        )
    _check_offload(options.offloaded_blocks, choice)
    if choice.strategy != "auto":
        ParallelSpec.of(choice.strategy, choice.num_ranks)


def _check_offload(number: int, choice: EngineChoice) -> None:
    if number < 0:
        raise ValueError(f"torch.offloaded_blocks is {number}; it must be 0 (none) or more")
    if not number or choice.num_ranks == 1:
        return
    if choice.strategy == "auto" or ParallelSpec.of(choice.strategy, choice.num_ranks).divides_weights:
        raise ValueError(
            f"torch.offloaded_blocks is {number} and strategy {choice.strategy!r}: blocks are offloaded on ranks with "
            "whole weights; name a strategy that shares tokens or branches alone, such as ulysses"
        )
