"""The rank actor: one process, one device, one place in the communicator. All logic is in the parts that it joins.

Torch is imported inside the actor: the process that spawns ranks imports this module too, and touches no tensor.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup

from engines.core.engine import RankContext
from engines.core.logs import log_phase, timed
from engines.core.parcel import Parcel
from engines.core.resources import open_rank_resources
from engines.core.storage import device_name
from engines.gang.config import BuildRank, BuiltRank, GangConfig, LoadRank, StoreAddress
from engines.gang.errors import portable
from engines.gang.jobs.job import Job
from engines.gang.jobs.step_plan import JobFailure, StepPlan
from engines.gang.placement import rank_strategy

if TYPE_CHECKING:
    from engines.gang.jobs.rank_jobs import RankJobs


logger = logging.getLogger(__name__)

NUM_ADMISSION_THREADS = 8
"""Conditionings that a rank waits for at the same time; more of them queue."""

# Steps run on the main thread, in order. The other groups answer while a step runs, or hangs.
CONCURRENCY_GROUPS = {"control": 1, "sentinel": 1, "admission": NUM_ADMISSION_THREADS}


@dataclass(frozen=True, kw_only=True, slots=True)
class RankInfo:
    rank: int
    pid: int
    node_id: str
    device: str
    device_name: str = ""


class Rank:
    """Called by the gang alone: ``open``, ``open_store`` (rank 0), ``join``, ``load``, ``build`` in this order, then
    others.

    Making one takes no time: an actor answers no ping before it is made, and what hangs then is found by pings alone.
    """

    def __init__(self, config: GangConfig, rank: int) -> None:
        device = "cuda:0" if config.gpus_per_rank else "cpu"  # Ray shows a rank its own GPU only
        self._config = config
        self._context = RankContext(rank=rank, num_ranks=config.num_ranks, device=device)
        self._build: BuildRank | None = None
        self._runner: RankJobs | None = None

    def open(self) -> None:
        """Import torch and take the device."""
        config, begun_s = self._config, time.monotonic()
        import torch

        from engines.gang.communicator import Communicator

        self._torch_s = time.monotonic() - begun_s
        torch.set_num_threads(config.threads_per_rank)
        self._resources = open_rank_resources()
        if config.gpus_per_rank:
            torch.cuda.set_device(self._context.device)
        self._communicator = Communicator(
            rank=self._context.rank,
            num_ranks=config.num_ranks,
            device=torch.device(self._context.device),
            timeout_s=2 * config.start_deadline_s + config.step_deadline_s,
            nccl=config.nccl,
        )

    def open_store(self) -> StoreAddress:
        return self._communicator.open_store(_node_ip())

    def join(self, address: StoreAddress) -> RankInfo:
        """Join the communicator. On a GPU, groups and first exchanges follow in a thread beside ``load``."""
        self._communicator.join(address)
        if self._context.device != "cpu":  # Gloo connects ranks at once: nothing to gain
            import torch

            from engines.parallel.early_start import start_early

            start_early(torch.device(self._context.device))
        node_id = ray.get_runtime_context().get_node_id()
        return RankInfo(
            rank=self._context.rank,
            pid=os.getpid(),
            node_id=node_id,
            device=self._context.device,
            device_name=device_name(self._context.device),
        )

    def load(self, load: LoadRank) -> None:
        self._build = load(self._context)
        rank = self._context.rank
        log_phase("rank: torch", self._torch_s, rank=rank)

    def build(self) -> BuiltRank:
        """Make the engine, and all that a job needs."""
        from engines.gang.jobs.rank_jobs import RankJobs, rehearse
        from engines.parallel.early_start import wait_for_early_start

        assert self._build is not None
        parts = self._build()
        self._build = None  # and the weights that it holds are the engine's
        wait_for_early_start()  # in case no engine did
        if self._config.elastic:
            with timed("rank: rehearsed transfers", rank=self._context.rank):
                rehearse(self._context)
        self._runner = RankJobs(parts, self._context)
        logger.info("rank is built", extra={"rank": self._context.rank})
        return BuiltRank(team_sizes=parts.engine.team_sizes, estimates=parts.estimates)

    def execute(self, plan: StepPlan) -> Any:
        """The report, followed by parcels of what ``plan.emits_of`` this rank names; Ray makes an object of each."""
        assert self._runner is not None
        report, emitted = self._runner.execute(plan)
        parcels = (None if latents is None else Parcel.of(latents) for latents in emitted)
        return (report, *parcels) if emitted else report

    def close(self) -> None:
        """Graphs and contexts go first, for they use memory of other ranks and the communicator, which goes last."""
        if self._runner is not None:
            self._runner.close()
        self._resources.close()
        self._communicator.leave()

    @ray.method(concurrency_group="admission")
    def admit(self, job: Job) -> JobFailure | None:
        """Resolve the conditioning, however long that takes, and hold the job. Steps of other jobs go on meanwhile."""
        assert self._runner is not None
        try:
            job = replace(job, conditioning=_here(job.conditioning))
        except Exception as error:
            return JobFailure(job_id=job.job_id, error=portable(_cause(error)), shared=False)
        self._runner.admit(job)
        return None

    @ray.method(concurrency_group="control")
    def ping(self) -> int:
        return self._context.rank

    @ray.method(concurrency_group="sentinel")
    def watch(self) -> None:
        """Never returns: the caller learns of this process's death from the call, at once."""
        threading.Event().wait()


def spawn_ranks(
    config: GangConfig, group: PlacementGroup, environments: Sequence[Mapping[str, str]], python: str = ""
) -> list[Any]:
    """Return one actor handle per rank. The actors end with the process that spawned them, and are never restarted.

    ``environments`` are the variables of each rank's process, and ``python`` the command that runs it (Ray's
    ``py_executable``), by default the caller's.
    """
    executable = {"py_executable": python} if python else {}
    # Ray's types do not know of concurrency groups.
    actor: Any = ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups=CONCURRENCY_GROUPS)(Rank)  # type: ignore[call-overload]
    return [
        actor.options(
            num_cpus=config.cpus_per_rank,
            num_gpus=config.gpus_per_rank,
            scheduling_strategy=rank_strategy(config, rank, group),
            runtime_env={**executable, **({"env_vars": dict(environment)} if environment else {})},
        ).remote(config, rank)
        for rank, environment in enumerate(environments)
    ]


def kill_ranks(ranks: Sequence[Any]) -> None:
    """End the processes, even of ranks that hang in an exchange. Rank 0, which keeps the store, goes last."""
    for rank in reversed(ranks):
        ray.kill(rank)


def _node_ip() -> str:
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def _here(conditioning: Any) -> Any:
    """The conditioning itself, fetched and unpacked if need be."""
    if isinstance(conditioning, ray.ObjectRef):
        conditioning = ray.get(conditioning)
    return conditioning.open() if isinstance(conditioning, Parcel) else conditioning


def _cause(error: Exception) -> Exception:
    """The exception that a task raised, rather than Ray's wrapping of it."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(error, ray.exceptions.RayTaskError) and isinstance(cause, Exception) else error
