"""Start gangs, run jobs to their end, and look for leaks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any

import psutil
import ray
import torch
from ray.util import placement_group_table
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from deployments.forked_workers import forking_python
from engines.gang.eta.measured_times import StepTimes
from engines.gang.gang import Gang
from engines.gang.gang_config import Clock, GangConfig
from engines.gang.jobs.job import Job, JobDone, JobEvent, JobQueued
from engines.gang.placement import gang_bundles, gang_strategy
from tests.engines.gang.support.fakes import load_fake
from tests.engines.gang.support.set_clock import SetClock
from tests.support.patience import PATIENCE_S

PYTHON = forking_python("model")
"""Ranks fork from the cluster's zygote, which has imported torch."""


@contextmanager
def group_for(config: GangConfig) -> Iterator[PlacementGroup]:
    group = placement_group(gang_bundles(config, replica_cpus=0.1), strategy=gang_strategy(config))
    try:
        yield group
    finally:
        remove_placement_group(group)


@asynccontextmanager
async def gang_of(
    config: GangConfig, clock: Clock | None = None, step_times: StepTimes | None = None
) -> AsyncIterator[Gang]:
    """Start a gang of fakes in a placement group of its own, and check that neither leaves anything behind.

    Without ``clock`` no deadline passes, so that a busy machine breaks no gang.
    """
    with group_for(config) as group:
        options: dict[str, Any] = {
            "model": "fake",
            "placement_group": group,
            "clock": clock or SetClock(),
            "python": PYTHON,
        }
        known = step_times or StepTimes()
        gang = await Gang.start(config, load_fake, step_times=lambda *_: known, **options)
        try:
            yield gang
        finally:
            await gang.close()
        await eventually(lambda: not alive(info.pid for info in gang.infos))


async def submit(gang: Gang, job: Job) -> AsyncGenerator[JobEvent, None]:
    """Yield the events of a job one by one, without ``JobQueued``."""
    async with aclosing(gang.submit_grouped(job, every_s=0.0)) as groups:
        async for group in groups:
            for event in group:
                if not isinstance(event, JobQueued):
                    yield event


async def run(gang: Gang, job: Job) -> list[JobEvent]:
    return [event async for event in submit(gang, job)]


async def held_jobs(gang: Gang) -> list[tuple[str, ...]]:
    """Return the jobs whose state each rank holds, also while it computes."""
    asked = [rank.__ray_call__.options(concurrency_group="admission") for rank in gang._ranks]
    held: list[tuple[str, ...]] = await asyncio.gather(
        *(one.remote(lambda rank: rank._runner.job_ids) for one in asked)
    )
    return held


async def latents(gang: Gang, job: Job) -> torch.Tensor:
    done = (await run(gang, job))[-1]
    assert isinstance(done, JobDone)
    opened: torch.Tensor = done.latents.open()
    return opened


def alive(pids: Iterable[int]) -> list[int]:
    return [pid for pid in pids if _is_alive(pid)]


def _is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def num_placement_groups() -> int:
    return sum(entry["state"] != "REMOVED" for entry in placement_group_table().values())


def num_free_cpus() -> float:
    free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    return free.get("CPU", 0.0)


async def eventually(holds: Callable[[], object]) -> None:
    """Wait until ``holds()``. Raise AssertionError after ``PATIENCE_S``."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline_s, f"not within {PATIENCE_S:g} s"
        await asyncio.sleep(0.05)
