"""Makes the plans of a gang: the mechanism, which asks a policy who goes first. Pure: no Ray, no clock, no results."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from engines.core.spec import tiling_sizes
from engines.gang.eta.prediction import StepPrediction
from engines.gang.eta.simulation import Simulation
from engines.gang.jobs.job import Job
from engines.gang.jobs.step_plan import Emit, JobStep, Move, StepPlan, Work
from engines.gang.policies.policy import Candidate, GangShape, Policy, Ranks, teams_of, within_room
from engines.gang.policies.shortest import Shortest


@dataclass(slots=True, eq=False)
class _Entry:
    """A job that has steps to plan; see ``Candidate`` for what is not said here."""

    job: Job
    number: int
    due_s: float | None
    step_s: Mapping[int, float]
    fastest_s: float
    whole_s: float
    num_planned: int = 0
    ranks: Ranks = ()
    holders: Ranks = ()

    @property
    def num_left(self) -> int:
        return self.job.num_steps - self.num_planned

    def plan_step(self) -> JobStep:
        self.num_planned += 1
        return JobStep(job_id=self.job.job_id, step=self.num_planned, emit=self._emit())

    def _emit(self) -> Emit | None:
        if not self.num_left:
            return "final"
        return "preview" if self.num_planned in self.job.preview_steps else None


class Scheduler:
    """Plans the steps of jobs in the order of its ``policy``, on all ranks or, if the gang is ``elastic``, on teams of
    ``team_sizes`` (by default all that tile the gang), which the policy chooses by the ``prediction`` of their steps.

    A job may be paused after any step for a more urgent one. At most ``max_running_jobs`` have begun at a time, since
    the ranks keep their states; while as many have, the most urgent of these goes on. A job's state goes before it to
    ranks that do not hold it. Up to ``max_batch`` jobs of one shape on one team are served together. An exclusive job
    begins when all before it have ended, and the others wait for its end.
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
        known_sizes = team_sizes or tiling_sizes(num_ranks)
        self._max_running_jobs = max_running_jobs
        self._policy: Policy = policy or Shortest()
        self._prediction = prediction or StepPrediction()
        self._gang = GangShape(
            num_ranks=num_ranks,
            team_sizes=known_sizes if elastic else (num_ranks,),
            move_s=self._prediction.move_s,
        )
        self._max_batch = max_batch
        self._entries: dict[str, _Entry] = {}
        self._may_run: list[_Entry] = []
        self._is_settled = False
        self._drops: list[str] = []
        self._numbers, self._sequences = count(), count()

    def add(self, job: Job, *, now_s: float = 0.0) -> None:
        """Take a job that the ranks know of, ``now_s`` by the clock of who calls."""
        assert job.job_id not in self._entries
        self._entries[job.job_id] = self._entry(job, next(self._numbers), now_s)
        self._is_settled = False

    def learn(self, prediction: StepPrediction) -> None:
        """Go by this one from now on."""
        self._prediction = prediction
        self._gang = replace(self._gang, move_s=prediction.move_s)
        for entry in self._entries.values():
            entry.step_s, entry.fastest_s, entry.whole_s = self._predicted_s(entry.job)
        self._is_settled = False

    def drop(self, job_id: str) -> None:
        """Plan no more steps of a job that the ranks know of, and have them forget it."""
        if self._entries.pop(job_id, None) is not None:
            self._end(job_id)
        self._drops.append(job_id)

    def next_plan(
        self, *, free: Collection[int] | None = None, is_idle: bool = True, now_s: float = 0.0
    ) -> StepPlan | None:
        """The next step of teams whose ranks are all ``free`` to be sent one (None: all are), or None when there is
        nothing to do. ``is_idle``: no earlier plan is under way."""
        free = self._gang.ranks if free is None else free
        if not self._is_settled or not self._gang.is_elastic:
            self._choose_teams(is_idle, now_s)
        due = [(ranks, jobs) for ranks, jobs in self._served() if set(ranks).issubset(free)]
        if not (due or self._drops):
            return None
        moves = tuple(move for ranks, jobs in due for entry in jobs if (move := _move_of(entry, ranks)))
        leaves = any(set(entry.holders) - set(ranks) for ranks, jobs in due for entry in jobs)
        works = tuple(self._plan_work(ranks, jobs) for ranks, jobs in due)
        drops, self._drops = tuple(self._drops), []
        is_for_all = bool(drops or moves or leaves) or any(work.ends_a_job for work in works)
        return StepPlan(sequence=next(self._sequences), works=works, drops=drops, moves=moves, is_for_all=is_for_all)

    @property
    def prediction(self) -> StepPrediction:
        return self._prediction

    def lone_s(self, job: Job) -> float:
        """Return what the steps of ``job`` are predicted to take by themselves."""
        *_, whole_s = self._predicted_s(job)
        return whole_s

    def finish_times_s(self, now_s: float = 0.0, *, beside: Sequence[Job] = ()) -> dict[str, float]:
        """Return when each job is predicted to have done its steps, in seconds from now, if no other comes.

        ``beside``: as if these came now. Steps that were planned already do not count.
        """
        return dict(self.ends_s(now_s, beside=beside))

    def ends_s(self, now_s: float = 0.0, *, beside: Sequence[Job] = ()) -> Iterator[tuple[str, float]]:
        """Like ``finish_times_s``, but a lazy iterator in order of completion."""
        number = max((entry.number for entry in self._entries.values()), default=0) + 1
        coming = [self._entry(job, number + i, now_s) for i, job in enumerate(beside)]
        is_known = self._is_settled and not beside
        entries = self._entries.items()
        simulation = Simulation(
            [_candidate(entry) for entry in (*self._entries.values(), *coming)],
            policy=self._policy,
            gang=self._gang,
            max_running_jobs=self._max_running_jobs,
            now_s=now_s,
            teams={job_id: entry.ranks for job_id, entry in entries if entry.ranks} if is_known else {},
        )
        return simulation.ends()

    # Who runs where.

    def _choose_teams(self, is_idle: bool, now_s: float) -> None:
        allowed = self._allowed(is_idle)
        self._is_settled = bool(allowed)  # an exclusive job may wait for the gang to be idle
        ordered = self._policy.order([_candidate(entry) for entry in self._entries.values()], now_s)
        num_begun = sum(bool(entry.holders) for entry in self._entries.values())
        ordered = within_room([one for one in ordered if one.id in allowed], self._max_running_jobs, num_begun)
        teams = teams_of(self._policy, ordered, self._gang, now_s)
        self._may_run = [self._entries[candidate.id] for candidate in ordered if candidate.may_run]
        for entry in self._entries.values():
            entry.ranks = teams.get(entry.job.job_id, ())

    def _allowed(self, is_idle: bool) -> set[str]:
        """The jobs that no exclusive one keeps from running."""
        entries = self._entries.values()
        alone = next((entry for entry in entries if entry.job.exclusive), None)
        if alone is None:
            return set(self._entries)
        before = {entry.job.job_id for entry in entries if entry.holders or entry.number < alone.number}
        if alone.holders or (is_idle and not before):
            return {alone.job.job_id}
        return before

    def _entry(self, job: Job, number: int, now_s: float) -> _Entry:
        due_s = None if job.left_s is None else now_s + job.left_s
        return _Entry(job, number, due_s, *self._predicted_s(job))

    def _predicted_s(self, job: Job) -> tuple[Mapping[int, float], float, float]:
        """Return the seconds of a step by team size, on the team that is fastest, and of all steps there."""
        step_s = self._prediction.by_size(job, self._gang.team_sizes)
        fastest_s = min(step_s.values())
        return step_s, fastest_s, job.num_forwards_after(0) * fastest_s

    # What becomes of it.

    def _served(self) -> Iterator[tuple[Ranks, list[_Entry]]]:
        """Each team and its jobs: the one that it was given to, and those of its shape that can come along."""
        taken: set[str] = set()
        for entry in [entry for entry in self._entries.values() if entry.ranks]:
            alike = [other for other in self._may_run if _are_alike(other, entry) and other.job.job_id not in taken]
            jobs = [entry, *alike[: self._max_batch - 1]]
            taken.update(other.job.job_id for other in jobs)
            yield entry.ranks, jobs

    def _plan_work(self, ranks: Ranks, jobs: list[_Entry]) -> Work:
        waiting = [_candidate(entry) for entry in self._entries.values() if not entry.ranks and entry not in jobs]
        for entry in jobs:
            gang_s = entry.step_s[len(ranks)] * len(ranks) / self._gang.num_ranks
            if self._policy.note(_candidate(entry), gang_s, waiting):
                self._is_settled = False
        steps = tuple(entry.plan_step() for entry in jobs)
        for entry in jobs:
            entry.holders = ranks
            if not entry.num_left:
                del self._entries[entry.job.job_id]
                self._end(entry.job.job_id)
        return Work(job_steps=steps, ranks=ranks)

    def _end(self, job_id: str) -> None:
        self._policy.forget(job_id)
        self._is_settled = False


def _candidate(entry: _Entry) -> Candidate:
    return Candidate(
        job=entry.job,
        number=entry.number,
        num_left=entry.job.num_forwards_after(entry.num_planned),
        step_s=entry.step_s,
        fastest_s=entry.fastest_s,
        whole_s=entry.whole_s,
        ranks=entry.ranks,
        holders=entry.holders,
        due_s=entry.due_s,
    )


def _are_alike(other: _Entry, entry: _Entry) -> bool:
    is_alike = entry.job.shape is not None and other.job.shape == entry.job.shape
    return is_alike and other is not entry and other.num_left > 0 and not other.ranks


def _move_of(entry: _Entry, ranks: Ranks) -> Move | None:
    """What brings the state of a job to those of ``ranks`` that do not hold it; None if all do, or none needs to."""
    missing = tuple(rank for rank in ranks if rank not in entry.holders)
    if not entry.holders or not missing:
        return None
    source = next((rank for rank in ranks if rank in entry.holders), entry.holders[0])
    return Move(job_id=entry.job.job_id, source=source, ranks=missing)
