"""Size, resources, deadlines and clock of a gang, and the contract of its ranks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from engines.core.engine import AdditionLoader, Engine, Forwards, RankContext, Sampler
from engines.core.estimates import StepEstimates
from engines.gang.policies.policy import find_policy
from engines.parallel.nccl_options import DEFAULT_OPTIONS, NcclOptions

FORKED_SILENCE_S, IMPORTS_SILENCE_S = 10.0, 60.0
"""Longest silence of a starting rank. Python answers no ping while it maps a library from a slow disk."""
FIRST_PROCESS_S = 12.0
"""Time for the first processes of a start to answer; usually they do within one to four seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GangConfig:
    """Settings of a gang. Ranks with GPUs use NCCL, others Gloo."""

    num_ranks: int = 2
    """Ranks of the gang: one actor and one device each."""
    cpus_per_rank: float = 0.5
    """CPUs that Ray reserves for each."""
    gpus_per_rank: float = 0.0
    """GPUs that Ray reserves for each; 0: the CPU is the device, below 1: ranks share a GPU."""
    threads_per_rank: int = 1
    """Threads of torch's operations on the CPU."""
    num_nodes: int = 1
    """Nodes of the cluster; each has the same number of ranks, in node order."""
    step_deadline_s: float = 60.0
    """Deadline of a step of a warm shape."""
    start_deadline_s: float = 600.0
    """Deadline of a whole start, and of a step of a cold shape."""
    process_deadline_s: float = 180.0
    """Time for the ranks' processes to run, in all attempts, and again for imports and opening the devices."""
    connect_deadline_s: float = 120.0
    """Time for the ranks to open the process group together."""
    load_deadline_s: float | None = None
    """Deadline of loading the weights; None: the rest of the start."""
    build_deadline_s: float | None = None
    """Deadline of compiling and the self-check; None: the rest of the start."""
    silence_deadline_s: float | None = None
    """Deadline of a starting rank's pings; None: ``FORKED_SILENCE_S`` after a fork, else ``IMPORTS_SILENCE_S``."""
    ping_deadline_s: float = 5.0
    """Deadline of a ready rank's pings."""
    plans_ahead: int = 2
    """Step plans submitted before the first result is awaited, at most."""
    max_running_jobs: int = 4
    """Jobs begun and not ended, at most: paused jobs keep their states on the ranks."""
    max_waiting_jobs: int = 32
    """Jobs admitted and not begun, at most; more are refused."""
    policy: str = "shortest"
    """The order of jobs; in an elastic gang also their teams."""
    max_wait_s: float | None = None
    """A job predicted to wait longer for others is refused."""
    elastic: bool = False
    """Jobs run side by side on teams; else all ranks work on one job at a time."""
    nccl: NcclOptions = DEFAULT_OPTIONS
    """Options of every process group between GPUs."""

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
        has_resources = self.cpus_per_rank > 0 or self.gpus_per_rank > 0
        _check(has_resources, "cpus_per_rank", self.cpus_per_rank, "above 0 for ranks without GPUs")
        single = self.gpus_per_rank == 0 or 0.5 < self.gpus_per_rank <= 1
        _check(single, "gpus_per_rank", self.gpus_per_rank, "0, or above 0.5 and up to 1 (no two ranks share a device)")
        _check(
            self.num_ranks % self.num_nodes == 0,
            "num_nodes",
            self.num_nodes,
            f"a divisor of num_ranks={self.num_ranks}",
        )

    @property
    def max_batch(self) -> int:
        """Jobs of one shape that a team advances together, at most."""
        return 1

    def silence_s(self, *, is_forked: bool) -> float:
        """Return the ping deadline of a starting rank."""
        usual_s = FORKED_SILENCE_S if is_forked else IMPORTS_SILENCE_S
        return usual_s if self.silence_deadline_s is None else self.silence_deadline_s

    def process_attempts_s(self) -> Iterator[float]:
        """Yield how long each attempt waits for processes to run: twice as long as the one before.

        A process that hangs is replaced early, and a slow machine still has ``process_deadline_s`` altogether.
        """
        limit_s, left_s = FIRST_PROCESS_S, self.process_deadline_s
        while left_s > 0:
            yield min(limit_s, left_s)
            left_s -= limit_s
            limit_s *= 2

    @property
    def ranks_per_node(self) -> int:
        return self.num_ranks // self.num_nodes


DEADLINES = tuple(
    f"{name}_deadline_s" for name in ("step", "start", "process", "connect", "load", "build", "silence", "ping")
)


def _check(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{name} is {value!r}; it must be {allowed}")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreAddress:
    """Address of rank 0's rendezvous store. It passes through the replica, which has no torch."""

    host: str
    """Address of rank 0's node."""
    port: int
    """Chosen by the store."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankParts:
    """Parts that a rank works with."""

    engine: Engine
    """Makes the forwards of a step."""
    sampler: Sampler[Any]
    """Begins jobs, and takes the solver's steps with predictions."""
    estimates: StepEstimates | None = None
    """Estimated step times of the engine; None if unknown."""
    additions: AdditionLoader | None = None
    """Loads what requests add to the weights; None: nothing comes at run time."""
    forwards: Forwards | None = None
    """Form of the modules' forwards; None if the engine does not report it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltRank:
    """Report of a rank after it is built."""

    team_sizes: tuple[int, ...]
    """Sizes of teams that its engine supports."""
    estimates: StepEstimates | None = None
    """Estimated step times of the engine; None if unknown."""
    forwards: Forwards | None = None
    """Form of its modules' forwards; None: not known."""


Environment = Mapping[str, str]
"""Environment variables of a process."""

BuildRank = Callable[[], RankParts]
"""Builds the engine from the loaded weights, for every team, and runs the self-check."""

LoadRank = Callable[[RankContext], BuildRank]
"""Loads weights on each rank at start (pickled by Ray). The result runs when all ranks have loaded.

Meanwhile a thread may exchange with the other ranks (``engines.parallel.early_start``). Code that copies weights to a
GPU calls ``wait_for_first_exchanges`` first. Code that uses ``torch.distributed`` other than through an engine, or
computes attention, calls ``wait_for_early_start`` first.
"""


class Clock:
    """The monotonic clock. All timing of a gang goes through it, so that tests can replace it."""

    def now_s(self) -> float:
        """Return the seconds since a fixed moment."""
        return time.monotonic()

    def timeout(self, delay_s: float | None) -> asyncio.Timeout:
        """Return a context that raises TimeoutError after ``delay_s``; None: never."""
        return asyncio.timeout(delay_s)
