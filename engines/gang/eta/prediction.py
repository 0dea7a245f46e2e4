"""What a step is predicted to take: as it was measured, or until then as it is estimated."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from engines.gang.jobs.job import Job

SPEEDUP_EXPONENT = 0.8
"""A team of w takes w ** -0.8 of one rank's time, where neither a measurement nor an estimate says: from 0.72
(512 x 512 pixels) to 0.87 (2048 x 2048) were measured on two H200s."""

NEAR = 8.0
"""Steps whose estimates differ by no more than so many times are near enough for one to say what the other takes, once
it was measured: of 512 x 512 and 2048 x 2048 pixels, each beside 1024 x 1024, that was within 7 % on H200s."""

USUAL_MOVE_S = 0.002
"""What a change of a job's team takes until one was measured: 0.9 and 1.2 ms were on H200s (512 x 512 pixels)."""

StepKey = tuple[str, int]
"""A shape as ``shape_name`` writes it, and the size of a team."""


def shape_name(shape: Hashable) -> str:
    """Returns how a shape is named where it is kept."""
    return repr(shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPrediction:
    """A value: whoever learns more makes another one. ``measured`` has the seconds of a step, ``estimated`` what their
    jobs said of the same ones (``Job.estimates_s``); what is estimated is multiplied by ``scale``, by which measured
    steps differ from their estimates. A step of which nothing is known takes ``usual_s`` on one rank: the number of
    steps decides. A job's state goes from rank to rank in ``move_s``.
    """

    measured: Mapping[StepKey, float] = field(default_factory=dict)
    estimated: Mapping[StepKey, float] = field(default_factory=dict)
    scale: float = 1.0
    usual_s: float = 1.0
    move_s: float = USUAL_MOVE_S

    def step_s(self, job: Job, team_size: int) -> float:
        """Returns the predicted seconds of a step of ``job`` on so many ranks."""
        measured_s = self.measured.get((shape_name(job.shape), team_size)) if job.shape is not None else None
        return self._derived_s(job, team_size) if measured_s is None else measured_s

    def by_size(self, job: Job, team_sizes: Iterable[int]) -> dict[int, float]:
        return {team_size: self.step_s(job, team_size) for team_size in team_sizes}

    def knows(self, job: Job) -> bool:
        """Returns whether what is predicted of ``job`` goes back to measured steps, of its shape or of one near enough.
        Anything else is a guess, good for an order and for nothing that is said or promised."""
        name = shape_name(job.shape)
        if job.shape is not None and any(known == name for known, _ in self.measured):
            return True
        for (_, team_size), near_s in self.estimated.items():
            estimate_s = estimated_s(job, team_size)
            if estimate_s is not None and 1 / NEAR <= estimate_s / near_s <= NEAR:
                return True
        return False

    def is_measured(self, job: Job, team_size: int) -> bool:
        return job.shape is not None and (shape_name(job.shape), team_size) in self.measured

    def measured_s(self, jobs: Sequence[Job], team_size: int) -> float:
        """Returns the seconds of a step of each of ``jobs``; 0 where one of them was not measured on so many ranks."""
        are_measured = all(self.is_measured(job, team_size) for job in jobs)
        return sum(self.step_s(job, team_size) for job in jobs) if are_measured else 0.0

    def _derived_s(self, job: Job, team_size: int) -> float:
        """From the nearest team size on which the shape was measured, as the estimates go; or from these alone."""
        name = shape_name(job.shape)
        sizes = [size for known, size in self.measured if known == name] if job.shape is not None else []
        estimate_s = self._estimate_s(job, team_size)
        if not sizes:
            return estimate_s
        nearest = min(sizes, key=lambda size: (abs(size - team_size), size))
        return self.measured[name, nearest] * estimate_s / self._estimate_s(job, nearest)

    def _estimate_s(self, job: Job, team_size: int) -> float:
        estimate_s = estimated_s(job, team_size)
        return self.usual_s / speedup(team_size) if estimate_s is None else self.scale * estimate_s


def estimated_s(job: Job, team_size: int) -> float | None:
    """Returns what ``job`` says that a step of it takes on so many ranks; None if it says nothing."""
    if not job.estimates_s:
        return None
    nearest = min(job.estimates_s, key=lambda size: (abs(size - team_size), size))
    return job.estimates_s[nearest] * speedup(nearest) / speedup(team_size)


def speedup(team_size: int) -> float:
    """Returns by how much a team is taken to be faster than one rank, where nothing says."""
    return float(team_size**SPEEDUP_EXPONENT)


def scale_of(measured_and_estimated: Iterable[tuple[float, float]]) -> float:
    """Returns the median by which measured steps exceed their estimates; 1 if there is none."""
    ratios = [measured_s / estimate_s for measured_s, estimate_s in measured_and_estimated]
    return median(ratios) if ratios else 1.0
