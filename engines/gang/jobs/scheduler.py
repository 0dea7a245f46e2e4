"""The scheduler's mechanism: makes plans in the order of a policy. Pure: no Ray, no clock, no results."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from engines.core.spec import tiling_sizes
from engines.gang.eta.prediction import StepPrediction
from engines.gang.eta.simulation import Simulation
from engines.gang.jobs.job import Job
from engines.gang.jobs.step_plan import Emit, JobStep, Move, StepPlan, Work
from engines.gang.policies.policy import Candidate, GangShape, Policy, Ranks, limit_running, teams_of
from engines.gang.policies.shortest import Shortest


@dataclass(frozen=True, kw_only=True, slots=True)
class _Times:
    """Predicted seconds of a job."""

    step_s: Mapping[int, float]
    """Time of a step of the current stage, by team size."""
    fastest_s: float
    """The same on the fastest team."""
    whole_s: float
    """Time of all steps of the job on the fastest teams."""
    later_s: float
    """Time of the steps after the current stage, with the change of weights before them."""


@dataclass(slots=True, eq=False)
class _Entry:
    """A job with steps to plan; other fields are as in ``Candidate``. Times are those of the next step's stage."""

    job: Job
    """The request as the gang admitted it."""
    number: int
    """Its place in order of arrival."""
    due_s: float | None
    times: _Times
    num_planned: int = 0
    """Steps in plans so far."""
    ranks: Ranks = ()
    holders: Ranks = ()

    @property
    def num_left(self) -> int:
        return self.job.num_steps - self.num_planned

    @property
    def current(self) -> Job:
        """The job as it is in the next step."""
        return self.job.at(self.num_planned + 1)

    @property
    def num_forwards(self) -> float:
        """Forwards that are left, in those of the current stage."""
        stages = self.job.stages_after(self.num_planned)
        number = next((number for stage, number in stages if stage.last_stage is self.current.last_stage), 0)
        return number + (self.times.later_s / self.times.fastest_s if self.times.later_s else 0)

    def plan_step(self) -> JobStep:
        self.num_planned += 1
        return JobStep(job_id=self.job.job_id, step=self.num_planned, emit=self._emit())

    def _emit(self) -> Emit | None:
        if not self.num_left:
            return "final"
        return "preview" if self.num_planned in self.job.preview_steps else None


class Scheduler:
    """Plans steps in the order of its ``policy``, on all ranks or, if ``elastic``, on teams of ``team_sizes``.

    By default teams may have all sizes that tile the gang. The policy chooses them by the ``prediction`` of steps. A
    job may be paused after any step for a more urgent one. At most ``max_running_jobs`` have begun, since the ranks
    hold their states. At that limit the most urgent of them continues. A job's state moves to ranks that lack it before
    its step. Up to ``max_batch`` jobs of one shape and with the same additions to the weights are served together on
    one team. An exclusive job begins when all jobs before it have ended, and later ones wait for its end.
    """

    def __init__(
        self,
        *,
        num_ranks: int,
        max_running_jobs: int,
        policy: Policy | None = None,
        prediction: StepPrediction | None = None,
        team_sizes: tuple[int, ...] | None = None,
        elastic: bool = False,
        max_batch: int = 1,
    ) -> None:
        all_sizes = team_sizes or tiling_sizes(num_ranks)
        self._max_running_jobs = max_running_jobs
        self._policy: Policy = policy or Shortest()
        self._prediction = prediction or StepPrediction()
        self._gang = GangShape(
            num_ranks=num_ranks,
            team_sizes=all_sizes if elastic else (num_ranks,),
            move_s=self._prediction.move_s,
            switch_s=self._prediction.switch_s,
        )
        self._max_batch = max_batch
        self._entries: dict[str, _Entry] = {}
        self._runnable: list[_Entry] = []
        self._teams_are_current = False
        self._drops: list[str] = []
        self._numbers, self._sequences = count(), count()

    def add(self, job: Job, *, now_s: float = 0.0) -> None:
        """Add a job that the ranks have admitted, at ``now_s`` of the caller's clock."""
        assert job.job_id not in self._entries
        self._entries[job.job_id] = self._entry(job, next(self._numbers), now_s)
        self._teams_are_current = False

    def learn(self, prediction: StepPrediction) -> None:
        """Use this prediction from now on."""
        self._prediction = prediction
        self._gang = replace(self._gang, move_s=prediction.move_s, switch_s=prediction.switch_s)
        for entry in self._entries.values():
            entry.times = self._times(entry.job, entry.num_planned)
        self._teams_are_current = False

    def forget_additions(self) -> None:
        """Take note that the weights of all ranks are as they were loaded."""
        self._gang = replace(self._gang, additions=())
        self._teams_are_current = False

    @property
    def additions(self) -> Hashable:
        """Additions to the weights of rank 0 after all planned steps."""
        return self._gang.additions_of(0)

    def drop(self, job_id: str) -> None:
        """Plan no more steps of a job that the ranks hold, and have them forget it."""
        if self._entries.pop(job_id, None) is not None:
            self._end(job_id)
        self._drops.append(job_id)

    def next_plan(
        self, *, free: Collection[int] | None = None, is_idle: bool = True, now_s: float = 0.0
    ) -> StepPlan | None:
        """Return the next step of the ``free`` teams (None: all), or None. ``is_idle``: the ranks execute no plan."""
        free = self._gang.ranks if free is None else free
        if not self._teams_are_current or not self._gang.is_elastic:
            self._choose_teams(is_idle, now_s)
        due = [(ranks, jobs) for ranks, jobs in self._teams_with_jobs() if set(ranks).issubset(free)]
        if not (due or self._drops):
            return None
        moves = tuple(move for ranks, jobs in due for entry in jobs if (move := _move_of(entry, ranks)))
        frees_holders = any(set(entry.holders) - set(ranks) for ranks, jobs in due for entry in jobs)
        works = tuple(self._plan_work(ranks, jobs) for ranks, jobs in due)
        drops, self._drops = tuple(self._drops), []
        is_for_all = bool(drops or moves or frees_holders) or any(work.ends_a_job for work in works)
        return StepPlan(sequence=next(self._sequences), works=works, drops=drops, moves=moves, is_for_all=is_for_all)

    @property
    def prediction(self) -> StepPrediction:
        return self._prediction

    @property
    def begun(self) -> list[str]:
        """Jobs with steps planned and steps left."""
        return [job_id for job_id, entry in self._entries.items() if entry.num_planned]

    @property
    def due_s(self) -> list[tuple[str, float]]:
        """Jobs with deadlines, and the time by which their steps must be done."""
        return [(job_id, entry.due_s) for job_id, entry in self._entries.items() if entry.due_s is not None]

    def lone_s(self, job: Job) -> float:
        """Return the predicted time of all steps of ``job`` without other jobs."""
        return self._times(job).whole_s

    def work_s(self, job: Job) -> float:
        """Return the predicted gang-seconds of all steps of ``job``.

        A gang under load divides itself, if it is elastic, into the teams on which steps take the fewest gang-seconds.
        """
        return self._work_s(job, 0)

    def left_s(self) -> dict[str, float]:
        """Return the same of the steps that are not planned yet, by job."""
        return {job_id: self._work_s(entry.job, entry.num_planned) for job_id, entry in self._entries.items()}

    def _work_s(self, job: Job, step: int) -> float:
        return sum(number * self._gang_s(stage) for stage, number in job.stages_after(step))

    def _gang_s(self, job: Job) -> float:
        step_s = self._prediction.by_size(job, self._gang.team_sizes)
        return min(one_s * size for size, one_s in step_s.items()) / self._gang.num_ranks

    def finish_times_s(self, now_s: float = 0.0, *, beside: Sequence[Job] = ()) -> dict[str, float]:
        """Return the predicted seconds from now until each job's last step, without further arrivals.

        ``beside``: jobs that are assumed to arrive now. Steps already planned do not count.
        """
        return dict(self.ends_s(now_s, beside=beside))

    def ends_s(self, now_s: float = 0.0, *, beside: Sequence[Job] = ()) -> Iterator[tuple[str, float]]:
        """Like ``finish_times_s``, but a lazy iterator in order of completion."""
        number = max((entry.number for entry in self._entries.values()), default=0) + 1
        arrivals = [self._entry(job, number + i, now_s) for i, job in enumerate(beside)]
        keeps_teams = self._teams_are_current and not beside
        entries = self._entries.items()
        simulation = Simulation(
            [_candidate(entry) for entry in (*self._entries.values(), *arrivals)],
            policy=self._policy,
            gang=self._gang,
            max_running_jobs=self._max_running_jobs,
            now_s=now_s,
            teams={job_id: entry.ranks for job_id, entry in entries if entry.ranks} if keeps_teams else {},
        )
        return simulation.ends()

    # Teams.

    def _choose_teams(self, is_idle: bool, now_s: float) -> None:
        allowed = self._allowed(is_idle)
        self._teams_are_current = bool(allowed)  # an exclusive job may wait for the gang to be idle
        candidates = self._gang.charged(_candidate(entry) for entry in self._entries.values())
        ordered = self._policy.order(candidates, now_s)
        num_begun = sum(bool(entry.holders) for entry in self._entries.values())
        ordered = limit_running([one for one in ordered if one.id in allowed], self._max_running_jobs, num_begun)
        teams = teams_of(self._policy, ordered, self._gang, now_s)
        self._runnable = [self._entries[candidate.id] for candidate in ordered if candidate.may_run]
        for entry in self._entries.values():
            entry.ranks = teams.get(entry.job.job_id, ())

    def _allowed(self, is_idle: bool) -> set[str]:
        """Return the jobs that no exclusive job keeps from running."""
        entries = self._entries.values()
        exclusive = next((entry for entry in entries if entry.job.exclusive), None)
        if exclusive is None:
            return set(self._entries)
        before = {entry.job.job_id for entry in entries if entry.holders or entry.number < exclusive.number}
        if exclusive.holders or (is_idle and not before):
            return {exclusive.job.job_id}
        return before

    def _entry(self, job: Job, number: int, now_s: float) -> _Entry:
        due_s = None if job.left_s is None else now_s + job.left_s
        return _Entry(job, number, due_s, self._times(job))

    def _times(self, job: Job, num_planned: int = 0) -> _Times:
        """Return the times of a job after ``num_planned`` steps. A later stage may begin with a change of weights."""
        current, after = job.at(num_planned + 1), job.at(job.num_steps)
        by_size, sizes = self._prediction.by_size, self._gang.team_sizes
        step_s = by_size(current, sizes)
        stages = [(stage, number * min(by_size(stage, sizes).values())) for stage, number in job.stages_after(0)]
        later_s = sum(stage_s for stage, stage_s in stages if stage.last_stage is not current.last_stage)
        switch_s = self._gang.switch_s if after.additions != current.additions else 0.0
        return _Times(
            step_s=step_s,
            fastest_s=min(step_s.values()),
            whole_s=sum(stage_s for _, stage_s in stages),
            later_s=0.0 if current.last_stage is None else later_s + switch_s,
        )

    # Plans.

    def _teams_with_jobs(self) -> Iterator[tuple[Ranks, list[_Entry]]]:
        """Yield each team with its job and further jobs of the same shape."""
        served: set[str] = set()
        for entry in [entry for entry in self._entries.values() if entry.ranks]:
            similar = [other for other in self._runnable if _can_batch(other, entry) and other.job.job_id not in served]
            jobs = [entry, *similar[: self._max_batch - 1]]
            served.update(other.job.job_id for other in jobs)
            yield entry.ranks, jobs

    def _plan_work(self, ranks: Ranks, jobs: list[_Entry]) -> Work:
        waiting = [_candidate(entry) for entry in self._entries.values() if not entry.ranks and entry not in jobs]
        for entry in jobs:
            # Step time weighted by the team's share of the gang. Other jobs wait for a change of weights too.
            team_s = entry.times.step_s[len(ranks)] + self._gang.switching_s(entry.current, ranks)
            self._gang = self._gang.switched(entry.current, ranks)
            gang_s = team_s * len(ranks) / self._gang.num_ranks
            if self._policy.note(_candidate(entry), gang_s, waiting):
                self._teams_are_current = False
        steps = tuple(entry.plan_step() for entry in jobs)
        for entry in jobs:
            entry.holders = ranks
            if not entry.num_left:
                del self._entries[entry.job.job_id]
                self._end(entry.job.job_id)
            elif entry.current.shape != entry.job.at(entry.num_planned).shape:
                entry.times, self._teams_are_current = self._times(entry.job, entry.num_planned), False
        return Work(job_steps=steps, ranks=ranks)

    def _end(self, job_id: str) -> None:
        self._policy.forget(job_id)
        self._teams_are_current = False


def _candidate(entry: _Entry) -> Candidate:
    return Candidate(
        job=entry.current,
        number=entry.number,
        num_left=entry.num_forwards,
        step_s=entry.times.step_s,
        fastest_s=entry.times.fastest_s,
        whole_s=entry.times.whole_s,
        ranks=entry.ranks,
        holders=entry.holders,
        due_s=entry.due_s,
    )


def _can_batch(other: _Entry, entry: _Entry) -> bool:
    one, same = entry.current, other.current
    has_same_shape = one.shape is not None and same.shape == one.shape
    has_same_weights = same.additions == one.additions
    return has_same_shape and has_same_weights and other is not entry and other.num_left > 0 and not other.ranks


def _move_of(entry: _Entry, ranks: Ranks) -> Move | None:
    """Return the move of a job's state to those of ``ranks`` that lack it; None if none is needed."""
    missing = tuple(rank for rank in ranks if rank not in entry.holders)
    if not entry.holders or not missing:
        return None
    source = next((rank for rank in ranks if rank in entry.holders), entry.holders[0])
    return Move(job_id=entry.job.job_id, source=source, ranks=missing)
