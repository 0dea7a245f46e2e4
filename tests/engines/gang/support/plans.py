"""Schedulers, their jobs and their plans, without ranks."""

from __future__ import annotations

from typing import Any

import pytest

from engines.gang.jobs.job import Job
from engines.gang.jobs.scheduler import Scheduler
from engines.gang.jobs.step_plan import StepPlan
from engines.gang.policies.policy import POLICIES


def policies_and_gangs() -> list[Any]:
    """Return each policy with fixed and elastic teams. Quick tests run all policies elastic, and one fixed."""
    first, *_ = POLICIES
    return [
        pytest.param(policy, elastic, marks=[] if elastic or policy == first else [pytest.mark.slow])
        for policy in POLICIES
        for elastic in (False, True)
    ]


def job(job_id: str, num_steps: int = 3, previews: tuple[int, ...] = ()) -> Job:
    return Job(
        job_id=job_id,
        request=None,
        conditioning=None,
        num_steps=num_steps,
        preview_steps=frozenset(previews),
    )


def scheduler(num_ranks: int = 4, max_running_jobs: int = 4, **options: object) -> Scheduler:
    return Scheduler(num_ranks=num_ranks, max_running_jobs=max_running_jobs, **options)  # type: ignore[arg-type]


def num_steps_left(scheduler: Scheduler) -> dict[str, int]:
    """Return the number of unplanned steps per job."""
    return {job_id: entry.num_left for job_id, entry in scheduler._entries.items()}


def all_plans(scheduler: Scheduler) -> list[StepPlan]:
    return list(iter(scheduler.next_plan, None))
