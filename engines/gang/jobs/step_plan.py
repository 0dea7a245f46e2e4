"""Plans sent to a gang's ranks before every step, and the ranks' reports. Small, frozen, free of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Emit = Literal["preview", "final"]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobStep:
    """One step of one job, which ranks forget after ``emit`` "final"."""

    job_id: str
    """The ``Job``'s."""
    step: int
    """Counted from 1; a job begins at step 1."""
    emit: Emit | None = None
    """Latents that the lead rank returns after it; None: none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The jobs that one team of ranks advances by a step, in one prediction."""

    job_steps: tuple[JobStep, ...]
    """One for each job."""
    ranks: tuple[int, ...]
    """The team; the first rank leads."""

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @property
    def job_ids(self) -> tuple[str, ...]:
        return tuple(job_step.job_id for job_step in self.job_steps)

    @property
    def emits(self) -> tuple[JobStep, ...]:
        return tuple(job_step for job_step in self.job_steps if job_step.emit)

    @property
    def ends_a_job(self) -> bool:
        return any(job_step.emit == "final" for job_step in self.job_steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """Transfer of a job's state between ranks; every rank of the gang takes part."""

    job_id: str
    """The ``Job``'s."""
    source: int
    """Rank with the newest state."""
    ranks: tuple[int, ...]
    """Ranks that receive it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """One step of the gang."""

    sequence: int
    """Number of the plan, from 0 and without gaps."""
    works: tuple[Work, ...] = ()
    """Works of disjoint teams."""
    drops: tuple[str, ...] = ()
    """Ids of jobs that ranks forget before all else."""
    moves: tuple[Move, ...] = ()
    """Transfers of jobs, before ``works``."""
    is_for_all: bool = True
    """Sent to all ranks, not only those of ``works``: jobs begin, end and change ranks in such plans."""

    @property
    def working_ranks(self) -> tuple[int, ...]:
        return tuple(rank for work in self.works for rank in work.ranks)

    def work_of(self, rank: int) -> Work | None:
        return next((work for work in self.works if rank in work.ranks), None)

    def emits_of(self, rank: int) -> tuple[JobStep, ...]:
        """Return the job steps after which ``rank`` returns latents, in the order of its results."""
        return next((work.emits for work in self.works if work.ranks[0] == rank), ())


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFailure:
    """An error that ends the job and leaves the gang whole."""

    job_id: str
    """The ``Job``'s."""
    error: Exception
    """Error for its submitter; it can be pickled."""
    shared: bool = True
    """True if every rank of the team must have seen it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """A rank's report on a plan."""

    rank: int
    """The sender's number in the gang."""
    sequence: int
    """The plan that it reports."""
    ended_ms: Mapping[int, float] = field(default_factory=dict)
    """Times of newly ended steps by the sequence of their plans: on a CPU this step, else earlier ones
    (``CudaStepTimer``)."""
    running_ms: float = 0.0
    """Time since the device began the forwards of the plan's step; 0 if it has not, and on a CPU."""
    move_ms: float = 0.0
    """Mean time of the plan's moves, including the wait for other ranks; 0 without moves."""
    switch_ms: float = 0.0
    """Time of changes of weights that newly ended; 0 without any."""
    was_warm: bool = True
    """The engine compiled and captured nothing (true without work)."""
    predicted: bool = True
    """The step made a forward; otherwise ``was_warm`` says nothing."""
    failures: tuple[JobFailure, ...] = ()
    """Jobs that the plan's step ended."""
