"""What a configuration may ask of the PyTorch engine. Without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engines.core.engine import EngineChoice
from engines.core.spec import PRECISIONS, ParallelSpec, check_known, is_static


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchOptions:
    """``calibration``: what ``troupe calibrate`` wrote, for static scales. ``peer_memory``: ranks write into each
    other's memory where that works, or never do and exchange through NCCL alone; "auto" is the former, unless a
    strategy "auto" has timed steps that say otherwise. With ``prompt_windows`` hand-ordered steps fill prompts up,
    where the model can, so that prompts of many lengths share a captured step; attention then has a mask.
    """

    calibration: Path | None = None
    peer_memory: bool | Literal["auto"] = "auto"
    prompt_windows: bool = False


def check(choice: EngineChoice) -> None:
    """Raise ``ValueError``, with what is allowed, if this engine cannot do what ``choice`` asks for."""
    options = choice.options or TorchOptions()
    assert isinstance(options, TorchOptions)
    check_known(choice.precision, PRECISIONS, "torch")
    if is_static(choice.precision) != (options.calibration is not None):
        raise ValueError(
            f"precision is {choice.precision!r} and torch.calibration {str(options.calibration)!r}: fp8-static and "
            "int8-static need a file that `troupe calibrate` wrote, and nothing else takes one"
        )
    if choice.strategy != "auto":
        ParallelSpec.of(choice.strategy, choice.num_ranks)
