"""The predicted time of a step: measured, or estimated until then. Pure: no clock, no files."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from engines.gang.jobs.job import Job

SPEEDUP_EXPONENT = 0.8
"""A team of w takes w ** -0.8 of one rank's time by default. On two H200s it was 0.72 (512 x 512 pixels) to 0.87
(2048 x 2048)."""

NEAR = 8.0
"""A measured step predicts steps whose estimates differ by up to this factor.

On H200s, 512 x 512 and 2048 x 2048 pixels were predicted from 1024 x 1024 within 7 %."""

USUAL_MOVE_S = 0.002
"""Default seconds of a change of a job's team: 0.9 and 1.2 ms measured on H200s (512 x 512 pixels)."""

USUAL_SWITCH_S = 0.083
"""Default seconds of a change of additions to the weights: 12 to 117 ms measured for FLUX.1-dev on one H200 (median of
four)."""

LEAD_S, LEAD_SHARE = 0.1, 0.25
"""Seconds, or fraction of a step, by which the next step is sent before the current one ends, to hide the call.

A sent step cannot be changed, and a job that arrives meanwhile waits for it."""

LINEAR_SHARE_TOKENS = 18_000
"""Tokens whose attention costs as much as their linears. Per token and layer these take 24 h² FLOP and attention 4 n
h, so n = 6 h, here for width 3072. FLUX.1-dev on one H200 (512 tokens of text): 1024 x 1024 pixels took 3.4 times the
time of 512 x 512, and 2048 x 2048 took 6.0 times the time of 1024 x 1024. This predicts 3.5 and 5.7."""

TOKENS_PER_S = 40_000
"""A unit rather than a speed: measurements correct all estimates by one factor."""

StepKey = tuple[str, int]
"""A shape's ``shape_name``, and the size of a team."""


def shape_name(shape: Hashable) -> str:
    """Return the name of a shape in files of measured times."""
    return repr(shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPrediction:
    """Immutable; new measurements make a new one."""

    measured: Mapping[StepKey, float] = field(default_factory=dict)
    """Seconds of measured steps."""
    estimated: Mapping[StepKey, float] = field(default_factory=dict)
    """Their estimates, as their jobs had them (``Job.estimates_s``)."""
    scale: float = 1.0
    """Factor by which measured steps exceed their estimates; it corrects all estimates."""
    usual_s: float = 1.0
    """Seconds of an unknown step on one rank. With equal steps, jobs are ordered by their number."""
    move_s: float = USUAL_MOVE_S
    """Seconds of a change of a job's team."""
    switch_s: float = USUAL_SWITCH_S
    """Seconds of a change of additions to the weights."""

    def step_s(self, job: Job, team_size: int) -> float:
        """Return the predicted seconds of a step of ``job`` on ``team_size`` ranks."""
        measured_s = self.measured.get((shape_name(job.shape), team_size)) if job.shape is not None else None
        return self._derived_s(job, team_size) if measured_s is None else measured_s

    def by_size(self, job: Job, team_sizes: Iterable[int]) -> dict[int, float]:
        return {team_size: self.step_s(job, team_size) for team_size in team_sizes}

    def knows(self, job: Job) -> bool:
        """Return whether the prediction is based on measured steps of the job's shapes, or of ones that are ``NEAR``.

        Anything else is a guess: good enough for an order, but not for clients.
        """
        return all(self._knows(stage) for stage, _ in job.stages_after(0))

    def _knows(self, job: Job) -> bool:
        name = shape_name(job.shape)
        if job.shape is not None and any(measured == name for measured, _ in self.measured):
            return True
        for (_, team_size), near_s in self.estimated.items():
            estimate_s = estimated_s(job, team_size)
            if estimate_s is not None and 1 / NEAR <= estimate_s / near_s <= NEAR:
                return True
        return False

    def is_measured(self, job: Job, team_size: int) -> bool:
        return job.shape is not None and (shape_name(job.shape), team_size) in self.measured

    def measured_s(self, jobs: Sequence[Job], team_size: int) -> float:
        """Return the seconds of a step of each of ``jobs``; 0 if one was not measured on ``team_size`` ranks."""
        are_measured = all(self.is_measured(job, team_size) for job in jobs)
        return sum(self.step_s(job, team_size) for job in jobs) if are_measured else 0.0

    def _derived_s(self, job: Job, team_size: int) -> float:
        """Scale the nearest measured team size of the shape by the estimates, or use these alone."""
        name = shape_name(job.shape)
        sizes = [size for other, size in self.measured if other == name] if job.shape is not None else []
        estimate_s = self._estimate_s(job, team_size)
        if not sizes:
            return estimate_s
        nearest = min(sizes, key=lambda size: (abs(size - team_size), size))
        return self.measured[name, nearest] * estimate_s / self._estimate_s(job, nearest)

    def _estimate_s(self, job: Job, team_size: int) -> float:
        estimate_s = estimated_s(job, team_size)
        return self.usual_s / speedup(team_size) if estimate_s is None else self.scale * estimate_s


def estimated_s(job: Job, team_size: int) -> float | None:
    """Return the job's own estimate of a step on ``team_size`` ranks; None without one."""
    if not job.estimates_s:
        return None
    nearest = min(job.estimates_s, key=lambda size: (abs(size - team_size), size))
    return job.estimates_s[nearest] * speedup(nearest) / speedup(team_size)


def forwards_left(job: Job, step: int, unit: int) -> float:
    """Return the forwards after ``step``, in forwards of the stage of step ``unit``, as far as there are estimates."""
    own_s = estimated_s(job.at(unit), 1)
    stages = ((number, estimated_s(stage, 1)) for stage, number in job.stages_after(step))
    return sum(number * (stage_s / own_s if stage_s and own_s else 1) for number, stage_s in stages)


def speedup(team_size: int) -> float:
    """Return the assumed speedup of a team over one rank."""
    return float(team_size**SPEEDUP_EXPONENT)


def scale_of(measured_and_estimated: Iterable[tuple[float, float]]) -> float:
    """Return the median factor by which measured steps exceed their estimates; 1 without any."""
    ratios = [measured_s / estimate_s for measured_s, estimate_s in measured_and_estimated]
    return median(ratios) if ratios else 1.0


def lead_s(step_s: float) -> float:
    """Return how long before the predicted end of a step the next one is sent."""
    return max(LEAD_S, LEAD_SHARE * step_s)


def rough_step_s(num_tokens: float, num_branches: int = 1) -> float:
    """Return the seconds of a step on one rank from its tokens alone, up to a factor common to all steps."""
    return num_branches * num_tokens * (1 + num_tokens / LINEAR_SHARE_TOKENS) / TOKENS_PER_S
