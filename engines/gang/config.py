"""How large a gang is, what each rank gets, and how long things may take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engines.core.engine import Engine
from engines.core.estimates import StepEstimates
from engines.core.rank import RankContext
from engines.core.sampler import Sampler
from engines.gang.policies.registry import find_policy
from engines.parallel.communication.nccl_options import DEFAULT_OPTIONS, NcclOptions

FORKED_SILENCE_S, IMPORTS_SILENCE_S = 10.0, 60.0
"""Python answers nothing while it maps a large library, which a slow disk makes long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GangConfig:
    """``num_ranks`` actors with ``cpus_per_rank`` CPUs and ``gpus_per_rank`` GPUs each; NCCL with GPUs, Gloo without.

    A gang on ``num_nodes`` > 1 has the same number of ranks on each, in node order. ``step_deadline_s`` is the longest
    a step may take once its ranks are warm, ``start_deadline_s`` covers a whole start, and steps of a shape until its
    ranks are warm. Within a start, ranks have ``process_deadline_s`` until their processes run, as much again to import
    libraries and open their devices, ``connect_deadline_s`` for their communicator, ``load_deadline_s`` for weights and
    ``build_deadline_s`` for compiling and the self-check (None: what is left of the start). From when its process runs
    a rank may answer no ping for ``silence_deadline_s`` (None: ``FORKED_SILENCE_S`` where it has its libraries from a
    fork, else ``IMPORTS_SILENCE_S``); one that is ready for ``ping_deadline_s``.

    At most ``plans_ahead`` step plans are submitted before the first result is awaited. ``policy`` names who goes
    first; if the gang is ``elastic``, it chooses the jobs' teams too, else all ranks work on one job at a time. At most
    ``max_running_jobs`` have begun at a time: paused ones keep their states on the ranks. A job that would wait for
    others longer than ``max_wait_s``, by prediction, is refused. ``nccl`` goes to every process group between GPUs.
    """

    num_ranks: int = 2
    cpus_per_rank: float = 0.5
    gpus_per_rank: float = 0.0
    threads_per_rank: int = 1
    num_nodes: int = 1
    step_deadline_s: float = 60.0
    start_deadline_s: float = 600.0
    process_deadline_s: float = 180.0
    connect_deadline_s: float = 120.0
    load_deadline_s: float | None = None
    build_deadline_s: float | None = None
    silence_deadline_s: float | None = None
    ping_deadline_s: float = 5.0
    plans_ahead: int = 2
    max_running_jobs: int = 4
    max_waiting_jobs: int = 32
    policy: str = "shortest"
    max_wait_s: float | None = None
    elastic: bool = False
    nccl: NcclOptions = DEFAULT_OPTIONS

    def __post_init__(self) -> None:
        for name in ("num_ranks", "threads_per_rank", "num_nodes", "plans_ahead", "max_running_jobs"):
            _check(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        find_policy(self.policy)
        for name in ("max_wait_s", *DEADLINES):
            _check(
                getattr(self, name) is None or getattr(self, name) > 0, name, getattr(self, name), "a time above 0 s"
            )
        for name in ("cpus_per_rank", "max_waiting_jobs"):
            _check(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        has_some = self.cpus_per_rank > 0 or self.gpus_per_rank > 0
        _check(has_some, "cpus_per_rank", self.cpus_per_rank, "above 0 for ranks without GPUs")
        alone = self.gpus_per_rank == 0 or 0.5 < self.gpus_per_rank <= 1
        _check(alone, "gpus_per_rank", self.gpus_per_rank, "0, or above 0.5 and up to 1 (no two ranks share a device)")
        _check(
            self.num_ranks % self.num_nodes == 0,
            "num_nodes",
            self.num_nodes,
            f"a divisor of num_ranks={self.num_ranks}",
        )

    @property
    def max_batch(self) -> int:
        """How many jobs of one shape a team advances together: more than one only where that is faster."""
        return 1

    def silence_s(self, *, is_forked: bool) -> float:
        """Return how long a rank that starts may answer no ping."""
        usual_s = FORKED_SILENCE_S if is_forked else IMPORTS_SILENCE_S
        return usual_s if self.silence_deadline_s is None else self.silence_deadline_s

    @property
    def ranks_per_node(self) -> int:
        return self.num_ranks // self.num_nodes


DEADLINES = tuple(
    f"{name}_deadline_s" for name in ("step", "start", "process", "connect", "load", "build", "silence", "ping")
)


def _check(ok: bool, name: str, given: object, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{name} is {given!r}; it must be {allowed}")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreAddress:
    """Where rank 0 keeps the rendezvous store. It passes through the replica, which does without torch."""

    host: str
    port: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RankParts:
    """What a rank runs: the engine that predicts and the sampler that steps."""

    engine: Engine
    sampler: Sampler[Any]
    estimates: StepEstimates | None = None
    """Of the engine's steps, if anybody knows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltRank:
    """What a rank tells of its parts: the sizes of teams that the engine knows, and what it is estimated to take."""

    team_sizes: tuple[int, ...]
    estimates: StepEstimates | None = None


Environment = Mapping[str, str]
"""Variables with which a process is started."""

BuildRank = Callable[[], RankParts]
"""Makes the engine for every team of what was loaded, and does the self-check."""

LoadRank = Callable[[RankContext], BuildRank]
"""Runs on each rank at start (pickled by Ray): loads weights, and returns what goes on when all ranks have theirs.

While it imports and loads, a thread may be exchanging with the other ranks
(``engines.parallel.communication.early_start``): who uses ``torch.distributed`` other than through an engine, or
computes attention, calls ``wait_for_early_start`` before.
"""
