"""Charges for requests, finished or not, to their API keys, and metrics of their outcomes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from deployments.observability.metrics import DEADLINES, OPEN, observe_turn
from deployments.service.interface import StageTimes
from deployments.service.run import Run
from deployments.usage.accounts import Accounts
from engines.gang.errors import QueueFullError
from pipelines.request import MediaRequest

ANSWER_WITHIN_S = 300.0
"""Ranks report on a job when its last step is over, and a large clip's step may take a while."""

logger = logging.getLogger("troupe.flow")


class UsageMeter:
    """Charges the GPU-seconds of requests to their keys, in ``accounts``.

    A request pays if it finishes, and if its client cancels it, leaves, or makes it fail. A request that the server
    fails (a broken gang, a defect) costs nothing.
    """

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self._charging: set[asyncio.Task[None]] = set()
        self._is_stopped = False

    def stop(self) -> None:
        """Charge nothing more for what ends early: from now on the server ends it."""
        self._is_stopped = True

    @contextmanager
    def metered(self, request: MediaRequest) -> Iterator[Callable[[StageTimes], None]]:
        """Count ``request`` as open inside the block. Yield the function to call with its times, once it is finished.

        A deadline counts as refused or failed where the block raises, and not at all where the client leaves.
        """
        began_s = time.perf_counter()

        def finish(times: StageTimes) -> None:
            self._accounts.charge(request.key, request.model, times.gpu_s)
            observe_turn(request.model, request.service_tier, times.queue_s, times.eta_s, times.total_s)
            if request.deadline_s is not None:
                is_met = time.perf_counter() - began_s <= request.deadline_s
                DEADLINES.labels(request.model, "met" if is_met else "missed").inc()

        with OPEN.labels(request.model, request.service_tier).track_inprogress():
            try:
                yield finish
            except Exception as failure:
                if request.deadline_s is not None:
                    outcome = "refused" if isinstance(failure, QueueFullError) else "failed"
                    DEADLINES.labels(request.model, outcome).inc()
                raise

    @contextmanager
    def charged(self, run: Run) -> Iterator[None]:
        """Charge ``run`` if it ends inside the block, unfinished, by its client's doing."""
        try:
            yield
        except (GeneratorExit, asyncio.CancelledError, ValueError):
            if run.job_id and not run.is_finished and not self._is_stopped:
                # In a context of its own: with a request, Serve cancels the calls that were made in the request's.
                task = asyncio.get_running_loop().create_task(self._charge(run), context=Context())
                self._charging.add(task)
                task.add_done_callback(self._charging.discard)
            raise

    async def _charge(self, run: Run) -> None:
        """Charge what the gang says: steps may have been under way. If no gang does, what it had reported before."""
        gpu_s = run.gpu_s if run.is_denoised else max(run.gpu_s, await self._spent_s(run))
        if gpu_s:
            self._accounts.charge(run.request.key, run.request.model, gpu_s, is_finished=False)

    async def _spent_s(self, run: Run) -> float:
        """Ask all gangs, as only they know which one has the job. Return 0 if none answers."""
        try:
            asked = run.stages.denoiser.broadcast("spent_s", run.job_id)
            answers = await asked.results_async(timeout_s=ANSWER_WITHIN_S, return_exceptions=True)
        except (RayError, RayServeException, TimeoutError) as error:
            logger.warning("no gang says what job %s took: %s", run.job_id, error)
            return 0.0
        return sum(answer for answer in answers if isinstance(answer, float))
