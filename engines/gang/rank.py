"""The rank actor: one process, one device, one place in the communicator. It only joins parts that hold the logic.

Torch is imported inside the actor, because the process that spawns ranks imports this module without torch.
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
from engines.core.resources import MemoryUse, open_rank_resources
from engines.core.storage import device_name
from engines.gang.errors import portable
from engines.gang.gang_config import BuildRank, BuiltRank, GangConfig, LoadRank, StoreAddress
from engines.gang.jobs.job import Job
from engines.gang.jobs.step_plan import JobFailure, StepPlan
from engines.gang.placement import rank_strategy

if TYPE_CHECKING:
    from engines.core.weight_memory import WeightMemory
    from engines.gang.jobs.rank_jobs import RankJobs


logger = logging.getLogger(__name__)

NUM_ADMISSION_THREADS = 8
"""Conditionings that a rank waits for at the same time; more of them queue."""

# Steps run on the main thread, in order. The other groups answer while a step runs or hangs.
CONCURRENCY_GROUPS = {"control": 1, "sentinel": 1, "admission": NUM_ADMISSION_THREADS}


@dataclass(frozen=True, kw_only=True, slots=True)
class RankInfo:
    """A rank's process and device."""

    rank: int
    """Its number in the gang."""
    pid: int
    """Id of its process on its node."""
    node_id: str
    """Ray's id of the node."""
    device: str
    """"cuda:0", or "cpu"."""
    device_name: str = ""
    """The device's model, such as "NVIDIA H200"."""


class Rank:
    """Called by the gang only: ``open``, ``open_store`` (rank 0), ``join``, ``load``, ``build`` in order, then others.

    The constructor must be quick: before it returns, an actor answers no ping, and only pings detect a hang.
    """

    def __init__(self, config: GangConfig, rank: int) -> None:
        device = "cuda:0" if config.gpus_per_rank else "cpu"  # Ray shows a rank its own GPU only
        self._config = config
        self._context = RankContext(rank=rank, num_ranks=config.num_ranks, device=device, num_hosts=config.num_nodes)
        self._build: BuildRank | None = None
        self._runner: RankJobs | None = None

    def open(self) -> None:
        """Import torch and take the device."""
        config, started_s = self._config, time.monotonic()
        import torch

        from engines.gang.communicator import Communicator

        self._torch_s = time.monotonic() - started_s
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
        return self._communicator.open_store(str(ray.util.get_node_ip_address()))  # type: ignore[no-untyped-call]

    def join(self, address: StoreAddress) -> RankInfo:
        """Join the communicator. On a GPU, groups and first exchanges follow in a thread beside ``load``."""
        self._communicator.join(address)
        if self._context.device != "cpu":  # Gloo connects ranks at once
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
        """Build the engine, and the state for jobs."""
        from engines.gang.jobs.rank_jobs import RankJobs, warm_up_transfers
        from engines.parallel.early_start import wait_for_early_start

        assert self._build is not None
        parts = self._build()
        self._build = None  # releases its references to the weights
        wait_for_early_start()  # in case the engine did not
        if self._config.elastic:
            with timed("rank: first transfers", rank=self._context.rank):
                warm_up_transfers(self._context)
        self._runner = RankJobs(parts, self._context)
        logger.info("rank is built", extra={"rank": self._context.rank})
        return BuiltRank(team_sizes=parts.engine.team_sizes, estimates=parts.estimates, forwards=parts.forwards)

    def execute(self, plan: StepPlan) -> Any:
        """Return the report, then a parcel of latents per ``plan.emits_of`` this rank, each as its own Ray object."""
        assert self._runner is not None
        report, emitted = self._runner.execute(plan)
        parcels = (None if latents is None else Parcel.of(latents) for latents in emitted)
        return (report, *parcels) if emitted else report

    def close(self) -> None:
        """Release graphs and contexts, which use other ranks' memory and the communicator, then the communicator."""
        if self._runner is not None:
            self._runner.close()
        self._resources.close()
        self._communicator.leave()

    # On the main thread, in order with the steps.

    def sleep(self) -> MemoryUse:
        """Move the weights to the host. Pings, admissions and drops go on."""
        self._memory.sleep()
        return self._memory.use()

    def wake(self) -> None:
        self._memory.wake()

    def prepare_host_memory(self, pinned_bytes: int | None) -> None:
        self._memory.prepare(pinned_bytes)

    def reserve_host_memory(self, pinned_bytes: int | None) -> None:
        self._memory.reserve(pinned_bytes)

    def memory_use(self) -> MemoryUse:
        return self._memory.use()

    @property
    def _memory(self) -> WeightMemory:
        from engines.core.weight_memory import WeightMemory

        return self._resources.get(WeightMemory)

    @ray.method(concurrency_group="admission")
    def admit(self, job: Job) -> JobFailure | None:
        """Resolve the conditioning, however long that takes, and hold the job, beside the steps of other jobs."""
        assert self._runner is not None
        try:
            self._runner.admit(replace(job, conditioning=_resolve(job.conditioning)))
        except Exception as error:
            return JobFailure(job_id=job.job_id, error=_answer(_cause(error), job.log_fields), shared=False)
        return None

    @ray.method(concurrency_group="admission")
    def load_addition(self, source: Any) -> int | Exception:
        """Return the size in bytes of an addition to the weights that is loaded now, or why it cannot be."""
        assert self._runner is not None
        try:
            return self._runner.load_addition(source)
        except Exception as error:
            return _answer(error, {"source": str(source)})

    @ray.method(concurrency_group="admission")
    def remove_addition(self, source: Any) -> None:
        """Release an addition once no job needs it."""
        assert self._runner is not None
        self._runner.remove_addition(source)

    @ray.method(concurrency_group="control")
    def ping(self) -> int:
        return self._context.rank

    @ray.method(concurrency_group="sentinel")
    def watch(self) -> None:
        """Block for ever: the pending call fails at once when this process dies."""
        threading.Event().wait()


def spawn_ranks(
    config: GangConfig,
    group: PlacementGroup,
    environments: Sequence[Mapping[str, str]],
    python: str = "",
    gpus: float | None = None,
) -> list[Any]:
    """Return one actor handle per rank. The actors end with the process that spawned them, and are never restarted.

    ``environments`` are the variables of each rank's process. ``python`` is the command that runs it (Ray's
    ``py_executable``), by default the caller's. ``gpus`` is the part of a GPU that a rank asks for where gangs share
    bundles (None: ``gpus_per_rank``).
    """
    executable = {"py_executable": python} if python else {}
    # Ray's types lack concurrency groups.
    actor: Any = ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups=CONCURRENCY_GROUPS)(Rank)  # type: ignore[call-overload]
    return [
        actor.options(
            num_cpus=config.cpus_per_rank,
            num_gpus=config.gpus_per_rank if gpus is None else gpus,
            scheduling_strategy=rank_strategy(config, rank, group),
            runtime_env={**executable, **({"env_vars": dict(environment)} if environment else {})},
        ).remote(config, rank)
        for rank, environment in enumerate(environments)
    ]


def kill_ranks(ranks: Sequence[Any]) -> None:
    """Kill the processes, even of ranks that hang in an exchange. Rank 0 holds the store and goes last."""
    for rank in reversed(ranks):
        ray.kill(rank)


def _resolve(conditioning: Any) -> Any:
    """Return the conditioning itself, fetched and unpacked if needed."""
    if isinstance(conditioning, ray.ObjectRef):
        conditioning = ray.get(conditioning)
    return conditioning.open() if isinstance(conditioning, Parcel) else conditioning


def _answer(error: Exception, fields: Mapping[str, object]) -> Exception:
    """Return ``error`` for the driver. Log a defect with its traceback; a ValueError is told to the client."""
    if not isinstance(error, ValueError):
        logger.error("admission fails: %r", error, extra=fields, exc_info=error)
    return portable(error)


def _cause(error: Exception) -> Exception:
    """Return the exception of a task instead of Ray's wrapper."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(error, ray.exceptions.RayTaskError) and isinstance(cause, Exception) else error
