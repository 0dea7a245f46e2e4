"""What ranks were at work for requests that ended before there was anything to show for it, and who pays."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Context

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from deployments.studio.run import Run
from deployments.usage.interface import Accounts

TOLD_WITHIN_S = 300.0
"""Ranks tell of a job when its last step is over, and a large clip's may take a while."""

logger = logging.getLogger("troupe.flow")


class Spending:
    """Counts for its key, in ``accounts``, what a request cost that its client cancelled or left, or that failed by the
    client's doing. What fails by ours (a gang that broke, a defect) costs nothing.

    The gang says what it was: a client that leaves may have left steps under way. So it is counted once these are over.
    """

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self._asking: set[asyncio.Task[None]] = set()
        self._is_stopped = False

    def stop(self) -> None:
        """From now on it is the server that ends what is under way: nobody pays for that."""
        self._is_stopped = True

    @contextmanager
    def charged(self, run: Run) -> Iterator[None]:
        """Counts what ``run`` cost, if it ends in the block, unfinished, by the doing of its client."""
        try:
            yield
        except (GeneratorExit, asyncio.CancelledError, ValueError):
            if run.job_id and not run.is_finished and not self._is_stopped:
                self._charge(run)
            raise

    def _charge(self, run: Run) -> None:
        if run.is_denoised:
            self._note(run, run.gpu_s)
            return
        # In a context of its own: with a request Serve cancels the calls that were made in the request's.
        task = asyncio.get_running_loop().create_task(self._charge_when_told(run), context=Context())
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _charge_when_told(self, run: Run) -> None:
        self._note(run, max(run.gpu_s, await self._told_s(run)))

    async def _told_s(self, run: Run) -> float:
        """Asks all gangs, as nobody knows from outside which one has the job. 0 if none says: then what was told of it
        before counts, as of a gang that has ended since."""
        try:
            asked = run.stages.denoiser.broadcast("spent_s", run.job_id)
            answers = await asked.results_async(timeout_s=TOLD_WITHIN_S, return_exceptions=True)
        except (RayError, RayServeException, TimeoutError) as error:
            logger.warning("no gang says what job %s took: %s", run.job_id, error)
            return 0.0
        return sum(answer for answer in answers if isinstance(answer, float))

    def _note(self, run: Run, gpu_s: float) -> None:
        if gpu_s:
            self._accounts.note(run.request.key, run.request.model, gpu_s, is_finished=False)
