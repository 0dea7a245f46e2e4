"""Execution of plans on a rank, without Ray: job states and their steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engines.additions import SwitchTimes
from engines.core.engine import JobFailedError, RankContext
from engines.core.model import Branch
from engines.core.packing import empty, joined, message_bytes, pack, unpack
from engines.core.resources import rank_resources
from engines.gang.errors import portable
from engines.gang.gang_config import RankParts
from engines.gang.jobs.job import Job
from engines.gang.jobs.step_plan import JobFailure, JobStep, Move, StepPlan, StepReport, Work
from engines.gang.jobs.step_timer import StepTimer, step_timer

TRANSFER_LENGTH = 2**20
"""Length of the latents of a picture of 2048 x 2048 pixels, in FLUX.1's packing."""


def transfer(state: Any, *, source: int, rank: int, device: torch.device) -> Any:
    """Return the ``state`` of rank ``source`` on every rank. All ranks of the gang make the call.

    Tensors on ``device`` go as one message between the devices, after everything else (pickled). An error of pickling
    is raised on every rank.
    """
    packed: list[Any] = [None, 0]
    tensors: list[Tensor] = []
    if rank == source:
        packed, tensors = _pack_state(state, device)
    dist.broadcast_object_list(packed, src=source, device=device)
    skeleton, num_bytes = packed
    if isinstance(skeleton, Exception):
        raise skeleton
    if num_bytes:
        message = joined(tensors, device) if rank == source else empty(num_bytes, device)
        dist.broadcast(message, src=source)
    return state if rank == source else unpack(skeleton, message if num_bytes else empty(0, device))


def warm_up_transfers(context: RankContext) -> None:
    """Connect the ranks for transfers from each rank, which took two H200s 0.33 s. All ranks of the gang call it."""
    device = torch.device(context.device)
    for source in range(context.num_ranks) if context.num_ranks > 1 else ():
        transfer({"x_L": torch.zeros(TRANSFER_LENGTH, device=device)}, source=source, rank=context.rank, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _pack_state(state: Any, device: torch.device) -> tuple[list[Any], list[Tensor]]:
    """Return the first message (skeleton or error, and size of the second), and the tensors of the second."""
    try:
        skeleton, tensors = pack(state, device)
    except Exception as error:  # the other ranks wait for this message
        return [portable(error), 0], []
    return [skeleton, message_bytes(tensors)], tensors


logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ResidentJob:
    """A job on a rank."""

    job: Job
    """The job, with its conditioning resolved."""
    state: Any = None
    """The sampler's state; None before step 1."""
    num_steps_done: int = 0
    """Steps that this rank made or received."""
    failed: bool = False
    """True if it ended in an error: steps that are still planned are skipped."""
    additions: object = None
    """Keeps the job's additions to the weights loaded."""


class RankJobs:
    """Executes plans in order. Every rank of a team holds equal states and so sees equal failures.

    An error of the sampler, or a ValueError or JobFailedError of the engine, fails the job alone. Any other error of
    ``predict`` leaves the communicator in an unknown state: it is raised and breaks the gang.
    """

    def __init__(self, parts: RankParts, context: RankContext, timer: StepTimer | None = None) -> None:
        """Create an empty table. ``timer``: None for the default of the rank's device."""
        self._engine = parts.engine
        self._sampler = parts.sampler
        self._additions = parts.additions
        self._context = context
        self._device = torch.device(context.device)
        self._timer = timer or step_timer(self._device)
        self._switch_times = rank_resources().get(SwitchTimes)
        self._switch_times.forget()  # the warm-up's are first switches
        self._residents: dict[str, ResidentJob] = {}
        self._failures: list[JobFailure] = []
        self._was_warm, self._predicted = True, False

    @property
    def job_ids(self) -> tuple[str, ...]:
        """Ids of the jobs that the rank holds."""
        return tuple(self._residents)

    def admit(self, job: Job) -> None:
        """Hold a job until its first step, with its additions to the weights loaded. May be called on another thread.

        ValueError if an addition cannot be loaded.
        """
        additions = self._additions.for_request(job.request) if self._additions is not None else None
        self._residents[job.job_id] = ResidentJob(job, additions=additions)

    def load_addition(self, source: Any) -> int:
        """Load an addition, and return its size in bytes. ValueError if it does not suit the model.

        May be called on another thread.
        """
        if self._additions is None:
            raise ValueError("this model takes no adapters at run time")
        return self._additions.load(source)

    def remove_addition(self, source: Any) -> None:
        """Release an addition once no job needs it. May be called on another thread."""
        if self._additions is not None:
            self._additions.remove(source)

    @torch.no_grad()
    def execute(self, plan: StepPlan) -> tuple[StepReport, tuple[Any, ...]]:
        """Return the report, and per ``plan.emits_of(rank)`` latents on the CPU, or None for a failed job."""
        self._timer.arrive()
        self._failures = []
        self._was_warm, self._predicted = True, False
        for job_id in plan.drops:
            self._drop(job_id)
        if plan.moves or plan.drops:  # perhaps the last plan with a job: report its last step time now
            self._timer.wait(0)
        move_ms = self._move_all(plan.moves)
        work = plan.work_of(self._context.rank)
        if work is not None:
            self._timer.begin(plan.sequence)
            self._step(work)
            self._timer.end()
            self._timer.wait(1)
        self._release_moved(plan)
        emitted = tuple(self._emit(job_step) for job_step in plan.emits_of(self._context.rank))
        self._forget_finished(plan)
        return self._report(plan, move_ms), emitted

    def close(self) -> None:
        """Drop all states and release the engine. The communicator must still be alive."""
        self._residents.clear()
        self._engine.close()

    def _drop(self, job_id: str) -> None:
        resident = self._residents.pop(job_id, None)
        if resident is not None:
            logger.info(
                "job is dropped", extra=self._log_fields(resident.job) | {"num_steps_done": resident.num_steps_done}
            )

    def _report(self, plan: StepPlan, move_ms: float) -> StepReport:
        return StepReport(
            rank=self._context.rank,
            sequence=plan.sequence,
            ended_ms=self._timer.ended_ms(),
            running_ms=self._timer.running_ms(),
            move_ms=move_ms,
            switch_ms=self._switch_times.take_ms(),
            was_warm=self._was_warm,
            predicted=self._predicted,
            failures=tuple(self._failures),
        )

    def _move_all(self, moves: Sequence[Move]) -> float:
        """Return the mean milliseconds of a move, from this rank's arrival at the first."""
        if not moves:
            return 0.0
        started_s = time.perf_counter()
        for move in moves:
            self._move(move)
        self._timer.settle()
        return 1e3 * (time.perf_counter() - started_s) / len(moves)

    def _move(self, move: Move) -> None:
        """Transfer a job's state. Called on every rank; all fail the job if the state cannot be pickled."""
        started_s, resident, rank = time.perf_counter(), self._residents[move.job_id], self._context.rank
        own_state = (resident.state, resident.num_steps_done, resident.failed) if rank == move.source else None
        with self._blame(resident):
            new_state = transfer(own_state, source=move.source, rank=rank, device=self._device)
            if rank in move.ranks:
                resident.state, resident.num_steps_done, resident.failed = new_state
                took_ms = 1e3 * (time.perf_counter() - started_s)
                logger.info(
                    "job comes from rank %d in %.1f ms", move.source, took_ms, extra=self._log_fields(resident.job)
                )

    def _release_moved(self, plan: StepPlan) -> None:
        """Drop outdated states of jobs that moved to other ranks."""
        for work in plan.works:
            if self._context.rank not in work.ranks:
                for job_id in work.job_ids:
                    if resident := self._residents.get(job_id):
                        resident.state = None

    def _step(self, work: Work) -> None:
        for job_step in work.job_steps:
            if job_step.step == 1:
                self._begin(self._residents[job_step.job_id])
        by_job = ((resident, self._branches(resident)) for resident in self._alive(work))
        forwards = [(resident, branches) for resident, branches in by_job if branches is not None]
        for resident, predictions in self._predict(forwards, work.ranks):
            with self._blame(resident):
                resident.state = self._sampler.advance(resident.state, predictions)
                resident.num_steps_done += 1

    def _alive(self, work: Work) -> list[ResidentJob]:
        # A plan may name a job that has failed since; an unknown job is a bug, hence the KeyError.
        return [resident for job_id in work.job_ids if not (resident := self._residents[job_id]).failed]

    def _begin(self, resident: ResidentJob) -> None:
        with self._blame(resident):
            resident.state = self._sampler.begin(resident.job.request, resident.job.conditioning)
            num_steps = self._sampler.num_steps(resident.state)
            if num_steps != resident.job.num_steps:
                raise RuntimeError(f"the job says {resident.job.num_steps} steps and its schedule has {num_steps}")
            logger.info("job begins", extra=self._log_fields(resident.job))

    def _branches(self, resident: ResidentJob) -> tuple[Branch, ...] | None:
        """Return the step's branches; None if the sampler fails, which fails the job."""
        with self._blame(resident):
            return self._sampler.branches(resident.state)
        return None

    def _predict(
        self, forwards: list[tuple[ResidentJob, tuple[Branch, ...]]], ranks: tuple[int, ...]
    ) -> list[tuple[ResidentJob, tuple[Tensor, ...]]]:
        """Run one forward for all jobs and split it by job. If it fails, omit the jobs that need it."""
        branches = tuple(branch for _, of_job in forwards for branch in of_job)
        idle_jobs: list[tuple[ResidentJob, tuple[Tensor, ...]]] = [(job, ()) for job, of_job in forwards if not of_job]
        if not branches:
            return idle_jobs
        self._timer.launch()
        try:
            predictions = iter(self._engine.predict(branches, ranks))
            self._was_warm, self._predicted = self._engine.was_warm, True
        except (ValueError, JobFailedError) as error:
            for resident, of_job in forwards:
                if of_job:
                    self._fail(resident, error)
            return idle_jobs
        return [(resident, tuple(islice(predictions, len(of_job)))) for resident, of_job in forwards]

    def _emit(self, job_step: JobStep) -> Any:
        resident = self._residents[job_step.job_id]
        if resident.failed:
            return None
        try:
            take = self._sampler.latents if job_step.emit == "final" else self._sampler.preview
            return take(resident.state)
        except Exception as error:
            # Only the lead rank takes latents: the job goes on here, as on the others, until it is dropped.
            self._fail(resident, error, shared=False)
            return None

    def _forget_finished(self, plan: StepPlan) -> None:
        """Forget jobs after their final step, also on ranks outside their team."""
        for job_step in (job_step for work in plan.works for job_step in work.emits):
            if job_step.emit == "final":
                resident = self._residents.pop(job_step.job_id)
                logger.info("job ends", extra=self._log_fields(resident.job) | {"failed": resident.failed})

    @contextmanager
    def _blame(self, resident: ResidentJob) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._fail(resident, error)

    def _fail(self, resident: ResidentJob, error: Exception, shared: bool = True) -> None:
        if shared:
            resident.failed, resident.state = True, None
        self._failures.append(JobFailure(job_id=resident.job.job_id, error=portable(error), shared=shared))
        fields, is_wrong = self._log_fields(resident.job), isinstance(error, ValueError) and not resident.num_steps_done
        if is_wrong:  # the request, not our code: the client is told
            logger.info("job fails: %s", error, extra=fields)
        else:
            logger.error("job fails: %s", error, extra=fields, exc_info=error)

    def _log_fields(self, job: Job) -> dict[str, object]:
        return job.log_fields | {"rank": self._context.rank}
