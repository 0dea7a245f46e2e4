"""Reports of a denoiser's replica to Serve: for the choice of a replica, and for their number."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from deployments.stages.common import PRIORITIES
from engines.gang.jobs.job import Job, JobDone
from engines.gang.load import GangLoad, NewWork, OpenWork
from pipelines.request import MediaRequest, StepKind, mix_of

if TYPE_CHECKING:
    from engines.gang.gang import Gang

NODE_DIGITS = 12
"""Digits of a node's hexadecimal id that a float holds."""
MAX_KINDS = 64
"""Kinds of jobs that are reported, the last used ones."""


def kind_of(request: MediaRequest) -> str:
    """Return the name of requests whose steps take equally long, as far as the router can tell."""
    kind = StepKind.of(request)
    return f"{kind.size} branches={kind.num_branches}{kind.settings}{kind.inputs}"


def adapters_of(mix: object) -> str:
    """Return the name of adapters and their weights, equal for equal ones, to send."""
    return repr(mix) if mix else ""


def new_work(request: MediaRequest) -> NewWork:
    """Return what a router knows of a request."""
    priority, adapters = PRIORITIES[request.service_tier], adapters_of(mix_of(request.loras))
    first, *later = request.stages
    num_last = sum(stage.num_inference_steps for stage in later)
    last_kind = kind_of(later[0]) if later else ""
    return NewWork(kind_of(first), first.num_inference_steps + num_last, priority, adapters, last_kind, num_last)


class ReplicaLoad:
    """Load of one gang, requests on their way included.

    ``start_s`` is how long its start took, ``node_id`` Ray's name of the replica's node, ``head_id`` that of the
    cluster's head.
    """

    def __init__(self, gang: Gang, start_s: float, node_id: str, head_id: str) -> None:
        self._gang, self._start_s = gang, start_s
        self._node, self._on_head = float(int(node_id[-NODE_DIGITS:], 16)), float(node_id == head_id)
        self._coming: dict[str, NewWork] = {}
        self._step_s: dict[str, float] = {}
        self._cold_s: float | None = None

    @contextmanager
    def coming(self, job_id: str, request: MediaRequest) -> Iterator[None]:
        """Count a request whose conditioning is still being made."""
        self._coming[job_id] = new_work(request)
        try:
            yield
        finally:
            del self._coming[job_id]

    def hear(self, job: Job, done: JobDone) -> None:
        """Learn from a finished job: the gang is warm for the kinds of its passes."""
        work_s = self._gang.work_s(job)
        if work_s is None or not job.num_forwards_after(0):
            return
        if not done.was_warm:  # others may have run between: the least of all counts
            cold_s = max(0.0, done.denoise_s - work_s)
            self._cold_s = cold_s if self._cold_s is None else min(self._cold_s, cold_s)
        for request, one in zip(job.request.stages, job.passes(), strict=True):
            pass_s, num_steps = self._gang.work_s(one), one.num_forwards_after(0)
            if pass_s is not None and num_steps:
                self._step_s.pop(kind_of(request), None)
                self._step_s[kind_of(request)] = pass_s / num_steps
        for oldest in [*self._step_s][:-MAX_KINDS]:
            del self._step_s[oldest]

    def routing_stats(self) -> dict[str, Any]:
        """Return the statistics for ``RequestRouter``."""
        by_urgency = self._gang.config.policy == "shortest"
        coming = {job_id: self._open_work(new) for job_id, new in self._coming.items()}
        load = GangLoad(
            jobs={**coming, **self._gang.open_work()},
            step_s=self._step_s,
            cold_s=self._cold_s or 0.0,
            by_urgency=by_urgency,
            wake_s=self._gang.wake_s,
            adapters=adapters_of(self._gang.additions),
            switch_s=self._gang.switch_s,
        )
        return load.to_stats()

    def autoscaling_stats(self) -> dict[str, float]:
        """Return the metrics for the autoscaling policy: the fields of a ``GangReport``."""
        report = self._gang.report()
        coming_s = sum(self._open_work(new).left_s for new in self._coming.values())
        place = {"start_s": self._start_s, "node": self._node, "on_head": self._on_head}
        backlog = {"backlog_s": report.backlog_s + coming_s, "num_jobs": report.num_jobs + len(self._coming)}
        return asdict(report) | place | backlog

    def _open_work(self, new: NewWork) -> OpenWork:
        left_s = new.steps_s(self._step_s) or 0.0
        return OpenWork(left_s, left_s / new.priority)
