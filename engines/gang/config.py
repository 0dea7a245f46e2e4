"""How large a gang is, what each rank gets, and how long things may take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engines.engine import Engine
from engines.sampler import Sampler


@dataclass(frozen=True, kw_only=True, slots=True)
class GangConfig:
    """``num_ranks`` actors with ``cpus_per_rank`` CPUs and ``gpus_per_rank`` GPUs each; NCCL with GPUs, Gloo without.

    ``step_deadline_s`` is the longest a step may take once its ranks are warm, ``start_deadline_s`` covers loading,
    compiling and the self-check. ``plans_ahead`` step plans are submitted before the first result is awaited.
    """

    num_ranks: int
    cpus_per_rank: float
    gpus_per_rank: float = 0.0
    threads_per_rank: int = 1
    step_deadline_s: float = 30.0
    start_deadline_s: float = 300.0
    ping_deadline_s: float = 5.0
    plans_ahead: int = 2
    max_running_jobs: int = 4
    max_waiting_jobs: int = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class RankContext:
    """Where a rank finds itself when it builds its parts. ``torch.distributed`` is initialised by then."""

    rank: int
    num_ranks: int
    device: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RankParts:
    """What a rank runs: the engine that predicts and the sampler that steps."""

    engine: Engine
    sampler: Sampler[Any]


BuildRank = Callable[[RankContext], RankParts]
"""Runs on each rank at start (pickled by Ray): loads weights, makes the engine for every width, does the self-check."""
