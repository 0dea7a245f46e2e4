"""Ray Serve's request router of denoisers: a request goes to the gang that is predicted to finish it first."""

from __future__ import annotations

import random
import time
from typing import Any

from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from deployments.stages.replica_load import new_work
from engines.gang.load import LoadBoard
from pipelines.request import MediaRequest


class FinishTimeRouter(FIFOMixin, RequestRouter):
    """Ranks replicas by ``LoadBoard``.

    The less loaded of two random replicas gets what no replica can predict, as by Serve's own router.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """See ``RequestRouter.initialize_state``."""
        self._board = LoadBoard()
        self.broken = set[str]()
        """Unique ids of replicas with broken gangs, until Serve's controller offers them no more."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """See ``RequestRouter.update_replicas``. It is called for each change of a replica's report."""
        self.broken &= {replica.replica_id.unique_id for replica in replicas}
        whole = [replica for replica in replicas if replica.replica_id.unique_id not in self.broken]
        stats = {replica.replica_id.unique_id: replica.routing_stats for replica in whole}
        self._board.hear(stats, time.monotonic())
        super().update_replicas(whole)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return replicas one by one in order of predicted finish; two random ones if that is unknown."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if job := _job_of(pending_request):
            job_id, request = job
            if ranked := self._board.choose([*by_name], job_id, new_work(request), time.monotonic()):
                return [[by_name[name]] for name in ranked]
        return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """See ``RequestRouter.on_request_routed``."""
        if job := _job_of(pending_request):
            self._board.confirm(replica_id.unique_id, job[0])


def _job_of(pending: PendingRequest | None) -> tuple[str, MediaRequest] | None:
    """Return id and request of a call of ``Denoiser.denoise``; None for other calls."""
    match pending.args if pending is not None else ():
        case [str(job_id), MediaRequest() as request, *_]:
            return job_id, request
    return None
