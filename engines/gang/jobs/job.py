"""A job on its way through a gang, and what the gang says about it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engines.core.transport.parcel import Parcel


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One request for the gang. ``request`` and ``conditioning`` go to ``Sampler.begin`` untouched.

    ``conditioning`` may be a ``Parcel`` or an ``ObjectRef``; it is resolved on the ranks, never in the scheduler's
    process.
    ``preview_steps`` count from 1. Jobs of equal ``shape`` share compiled programs: steps get the start deadline until
    their ranks have found everything ready for it (None: the first step of each job). ``exclusive`` keeps other jobs
    from running: if the gang breaks, it is clear under which job.
    ``request_id`` is for the logs.

    For the scheduler's policy: ``estimates_s`` are what a step takes beside those of other jobs, by team size, up to a
    factor that all of them share (as the cost model says, or else its tokens); a job of ``priority`` 4 counts as if it
    took a quarter of its time; ``deadline_s`` after its request arrived it should be done, ``waited_s`` of which were
    over when it came here, and ``decode_s`` of which decoding its latents will take, as far as that was measured;
    ``key`` is whose it is, and ``weight`` how much that one may have beside others.
    ``accepted``: neither the length of the queue nor the wait refuses it, since its client was kept waiting already.
    ``idle_steps`` (counted from 1) make no forwards, and take next to no time.
    """

    job_id: str
    request: Any
    conditioning: Any
    num_steps: int
    preview_steps: frozenset[int] = frozenset()
    shape: Hashable | None = None
    exclusive: bool = False
    request_id: str = ""
    estimates_s: Mapping[int, float] = field(default_factory=dict)
    priority: float = 1.0
    deadline_s: float | None = None
    waited_s: float = 0.0
    decode_s: float = 0.0
    key: str = ""
    weight: float = 1.0
    accepted: bool = False
    idle_steps: frozenset[int] = frozenset()

    def num_forwards_after(self, step: int) -> int:
        """Return how many of the steps after this one (0: of all) take the time of a step."""
        return self.num_steps - step - sum(idle > step for idle in self.idle_steps)

    @property
    def left_s(self) -> float | None:
        """What its deadline leaves for its steps as it comes to a gang; None without one."""
        return None if self.deadline_s is None else self.deadline_s - self.waited_s - self.decode_s

    @property
    def log_fields(self) -> dict[str, object]:
        """Fields for ``extra``. Not ``job_id``: Ray's JSON logs write the id of their own job over that field."""
        return {"gang_job_id": self.job_id, "request_id": self.request_id}


@dataclass(frozen=True, kw_only=True, slots=True)
class JobQueued:
    """The gang has taken a job, and will have done its steps in ``eta_s``, by prediction; None while that would be a
    guess (see ``StepPrediction.knows``). The gang had ``num_before`` other jobs then."""

    job_id: str
    eta_s: float | None
    num_before: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDone:
    """``step_ms`` is what the job's newest step took that is known to be over: on a GPU one before this, None at first.
    ``eta_s`` is the prediction for the steps that are left, those of other jobs before them included; None while that
    would be a guess. In the steps that are known to be over ranks were at work for ``gpu_s``, all of them added up."""

    job_id: str
    step: int
    num_steps: int
    step_ms: float | None
    num_ranks: int
    eta_s: float | None = None
    gpu_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PreviewReady:
    """Latents as they would come out if the job ended now."""

    job_id: str
    step: int
    latents: Parcel


@dataclass(frozen=True, kw_only=True, slots=True)
class JobDone:
    """Finished latents. ``queue_s`` is the wait for the first step, ``denoise_s`` the rest; in its steps ranks were at
    work for ``gpu_s``, all of them added up.

    ``was_warm``: no step had to wait for something that an earlier job of its shape would have left ready.
    ``same_bytes``: its request gives these very latents whenever it comes. Not in an elastic gang, where others decide
    how many ranks it gets, and sums over other numbers of ranks round differently.
    """

    job_id: str
    latents: Parcel
    queue_s: float
    denoise_s: float
    was_warm: bool
    gpu_s: float = 0.0
    same_bytes: bool = True


JobEvent = JobQueued | StepDone | PreviewReady | JobDone
