"""What a gang's ranks are told before every step, and what they answer. Small, frozen, free of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Emit = Literal["preview", "final"]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobStep:
    """One step (counted from 1) of one job; with ``emit`` the lead rank hands out latents after it.

    A job begins at its step 1, and a rank forgets it after ``final``.
    """

    job_id: str
    step: int
    emit: Emit | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The jobs that one team of ranks advances by a step, in one prediction. The first rank leads."""

    job_steps: tuple[JobStep, ...]
    ranks: tuple[int, ...]

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
    """The state of a job goes from rank ``source`` to ``ranks``; every rank of the gang takes part."""

    job_id: str
    source: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """One step of the gang: first ``drops`` are forgotten, then ``moves`` made. The teams in ``works`` are disjoint.

    Unless it ``is_for_all``, only ranks of ``works`` are sent it: jobs begin, end and change ranks in plans that are.
    """

    sequence: int
    works: tuple[Work, ...] = ()
    drops: tuple[str, ...] = ()
    moves: tuple[Move, ...] = ()
    is_for_all: bool = True

    @property
    def working_ranks(self) -> tuple[int, ...]:
        return tuple(rank for work in self.works for rank in work.ranks)

    def work_of(self, rank: int) -> Work | None:
        return next((work for work in self.works if rank in work.ranks), None)

    def emits_of(self, rank: int) -> tuple[JobStep, ...]:
        """The job steps after which ``rank`` hands out latents, in the order of its results."""
        return next((work.emits for work in self.works if work.ranks[0] == rank), ())


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFailure:
    """``error`` ends the job and leaves the gang whole. ``shared``: every rank of the team must have seen it."""

    job_id: str
    error: Exception
    shared: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """A rank's answer to a plan. ``ended_ms`` is what the rank's steps took that are over and were not told of before,
    by the sequences of their plans: its own, if it works as a CPU does; else those before it (see ``CudaStepTimer``).

    ``move_ms`` is what each of the plan's moves took it, waiting for the other ranks included; 0 without any.
    ``was_warm``: the engine found everything ready for what it predicted (true of a rank without work). ``predicted``:
    it made a forward; of a step without any, nothing is learned about what is ready.
    """

    rank: int
    sequence: int
    ended_ms: Mapping[int, float] = field(default_factory=dict)
    move_ms: float = 0.0
    was_warm: bool = True
    predicted: bool = True
    failures: tuple[JobFailure, ...] = ()
