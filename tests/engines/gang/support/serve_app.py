"""A Serve deployment with a gang in its replica's placement group, like the application's denoiser."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from ray import serve

from engines.gang.gang import Gang
from engines.gang.gang_config import GangConfig
from engines.gang.jobs.job import Job, JobEvent
from engines.gang.placement import gang_bundles, gang_strategy
from tests.engines.gang.support.fakes import load_fake
from tests.engines.gang.support.helpers import held_jobs, submit
from tests.support.patience import PATIENCE_S

CONFIG = GangConfig(num_ranks=2, cpus_per_rank=0.1, step_deadline_s=PATIENCE_S, ping_deadline_s=PATIENCE_S)


class GangHost:
    async def __init__(self) -> None:  # type: ignore[misc]  # Serve awaits it
        self._gang = await Gang.start(CONFIG, load_fake)

    async def denoise(self, job: Job) -> AsyncGenerator[JobEvent, None]:
        async with aclosing(submit(self._gang, job)) as events:
            async for event in events:
                yield event

    async def pids(self) -> tuple[int, ...]:
        """Return the pids of the replica and its ranks."""
        return (os.getpid(), *(info.pid for info in self._gang.infos))

    async def held_jobs(self) -> list[tuple[str, ...]]:
        return await held_jobs(self._gang)

    async def check_health(self) -> None:
        await self._gang.check_health()


def gang_app() -> Any:
    deployment: Any = serve.deployment(
        GangHost,
        ray_actor_options={"num_cpus": 0.1},
        placement_group_bundles=gang_bundles(CONFIG, replica_cpus=0.1),
        placement_group_strategy=gang_strategy(CONFIG),
        max_ongoing_requests=100,
        health_check_period_s=1,
        health_check_timeout_s=PATIENCE_S,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=5,
    )
    return deployment.bind()
