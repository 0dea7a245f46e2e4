"""A job of a gang, and its events."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engines.core.parcel import Parcel


@dataclass(frozen=True, kw_only=True, slots=True)
class LastStage:
    """The steps of a job from one on, if they have another shape, or other additions to the weights, than before."""

    num_steps: int
    """Steps of this part of the job."""
    shape: Hashable | None
    """``Job.shape`` of these steps."""
    estimates_s: Mapping[int, float] = field(default_factory=dict)
    """``Job.estimates_s`` of these steps."""
    additions: Hashable = ()
    """``Job.additions`` of these steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One request for the gang."""

    job_id: str
    """Unique among the gang's open jobs."""
    request: Any
    """Passed to ``Sampler.begin`` unchanged."""
    conditioning: Any
    """May be a ``Parcel`` or an ``ObjectRef``: it is resolved on the ranks, never in the scheduler's process."""
    num_steps: int
    """Steps of the sampler, those without forwards included."""
    preview_steps: frozenset[int] = frozenset()
    """Steps after which to emit a preview, counted from 1."""
    shape: Hashable | None = None
    """Jobs of equal shape share compiled programs. Cold steps get the start deadline (None: each job's first step)."""
    exclusive: bool = False
    """No other job runs beside it: if the gang breaks, the cause is known."""
    request_id: str = ""
    """Id in the logs."""
    estimates_s: Mapping[int, float] = field(default_factory=dict)
    """Estimated step time by team size, up to a factor common to all jobs (by the cost model, or by tokens)."""
    priority: float = 1.0
    """A job of priority 4 is ordered as if it took a quarter of its time."""
    deadline_s: float | None = None
    """Seconds from the request's arrival to its deadline."""
    waited_s: float = 0.0
    """Seconds since the request's arrival when the job reaches the gang."""
    decode_s: float = 0.0
    """Measured time to decode its latents; 0 if unknown."""
    key: str = ""
    """Owner of the job, for fair sharing."""
    weight: float = 1.0
    """Share of the owner, relative to others."""
    accepted: bool = False
    """Admitted earlier: neither queue length nor predicted wait refuses it."""
    additions: Hashable = ()
    """Key of the additions to the weights in its steps; () for none. Ranks change weights for a job with others."""
    idle_steps: frozenset[int] = frozenset()
    """Steps without forwards, counted from 1; they take next to no time."""
    last_stage: LastStage | None = None
    """The steps at its end to which ``shape``, ``estimates_s`` and ``additions`` do not apply."""

    def at(self, step: int) -> Job:
        """Return the job with the shape, the estimates and the additions that it has in ``step``, counted from 1."""
        last = self.last_stage
        if last is None or step <= self.num_steps - last.num_steps:
            return self
        return replace(self, shape=last.shape, estimates_s=last.estimates_s, additions=last.additions, last_stage=None)

    def passes(self) -> tuple[Job, ...]:
        """Return a job for the steps of each stage alone."""
        last = self.last_stage
        if last is None:
            return (self,)
        num_first = self.num_steps - last.num_steps
        idle = [frozenset(one for one in self.idle_steps if one <= num_first)]
        idle.append(frozenset(one - num_first for one in self.idle_steps if one > num_first))
        first = replace(self, num_steps=num_first, idle_steps=idle[0], last_stage=None)
        return first, replace(self.at(self.num_steps), num_steps=last.num_steps, idle_steps=idle[1])

    def stages_after(self, step: int) -> tuple[tuple[Job, int], ...]:
        """Return the job as it is in each stage with forwards after ``step``, and their number."""
        num_last = 0 if self.last_stage is None else self.last_stage.num_steps
        last = self.num_forwards_after(max(step, self.num_steps - num_last))
        stages = ((self, self.num_forwards_after(step) - last), (self.at(self.num_steps), last))
        return tuple((stage, number) for stage, number in stages if number)

    def num_forwards_after(self, step: int) -> int:
        """Return the number of steps with forwards after ``step`` (0: in the whole job)."""
        return self.num_steps - step - sum(idle > step for idle in self.idle_steps)

    @property
    def left_s(self) -> float | None:
        """Seconds left for its steps when it reaches a gang; None without a deadline."""
        return None if self.deadline_s is None else self.deadline_s - self.waited_s - self.decode_s

    @property
    def log_fields(self) -> dict[str, object]:
        """Fields for ``extra``. Not ``job_id``: Ray's JSON logs overwrite that field with Ray's job id."""
        return {"gang_job_id": self.job_id, "request_id": self.request_id}


@dataclass(frozen=True, kw_only=True, slots=True)
class JobQueued:
    """The gang has admitted a job."""

    job_id: str
    """The ``Job``'s."""
    eta_s: float | None
    """Predicted seconds to its last step; None if that would be a guess (see ``StepPrediction.knows``)."""
    num_before: int = 0
    """Other open jobs at admission."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """A job has done ``step`` of ``num_steps``. From the ranks to the clients, this is the only such event."""

    job_id: str = ""
    """The ``Job``'s; empty where a client sums several."""
    step: int
    """Steps done, from 1."""
    num_steps: int
    """Steps of the whole job, those without forwards included."""
    num_ranks: int = 0
    """Size of the team that made the step; 0 where it is not known."""
    eta_s: float | None = None
    """Predicted seconds to the last step, waits for other jobs included; None if that would be a guess."""
    gpu_s: float = 0.0
    """Rank-seconds of all measured steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreviewReady:
    """Latents as they would come out if the job ended now."""

    job_id: str
    """The ``Job``'s."""
    step: int
    """Steps done before it, from 1."""
    latents: Parcel
    """Input of the decoder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobDone:
    """Finished latents."""

    job_id: str
    """The ``Job``'s."""
    latents: Parcel
    """Input of the decoder."""
    queue_s: float
    """Wait for the first step."""
    denoise_s: float
    """Time from the first step to the end."""
    was_warm: bool
    """No step compiled or captured anything."""
    gpu_s: float = 0.0
    """Rank-seconds of its steps."""
    same_bytes: bool = True
    """The request always gives the same latents. False in an elastic gang: rounding depends on the team size."""


JobEvent = JobQueued | Progress | PreviewReady | JobDone
