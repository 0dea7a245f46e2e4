"""Ray Serve's autoscaling policy of denoisers: the number of gangs by predicted work.

Serve calls the policy in its controller ten times a second. Its input are the metrics of the replicas
(``Denoiser.record_autoscaling_stats``).
"""

from __future__ import annotations

from typing import Any

from ray.serve.config import AutoscalingContext

from engines.gang.autoscaling import UNHEARD, GangReport, GangScaler, Observation, RankDemand, ScalingRules, share_ranks

DECIDE_EVERY_S = 1.0
"""Replicas report this often."""
LOOK_BACK_S = 5.0
"""Serve counts open requests as their mean over this period, for models without a gang."""
REPORT_MAX_AGE_S = 10.0
"""A gang with an older report, or none, counts as busy, and a model with an older demand as gone."""

DEMANDS: dict[str, tuple[float, RankDemand]] = {}
"""Newest demand of each model that shares ranks, and its time."""


class ScaleByWork:
    """One model's policy, by ``rules`` (``ScalingRules``). All models share ``max_ranks`` (None: no limit)."""

    def __init__(
        self, *, priority: float = 1.0, num_ranks: int = 1, max_ranks: int | None = None, **rules: Any
    ) -> None:
        self._scaler = GangScaler(ScalingRules(**rules))
        self._priority, self._num_ranks, self._max_ranks = priority, num_ranks, max_ranks
        self._decided_s: float | None = None
        self._target = 0

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas. Serve starts one at first, if there is none."""
        now_s = ctx.current_time or 0.0
        if self._decided_s is None or now_s - self._decided_s >= DECIDE_EVERY_S:
            self._decided_s = now_s
            seen = observe(ctx)
            want = self._scaler.want(seen)
            self._target = self._scaler.settle(seen, want, self._granted(ctx.deployment_name, want, now_s))
        if not self._target and ctx.total_num_requests > 0:
            return 1, {}  # Serve would start a gang again while it counts requests, as it does for ``LOOK_BACK_S``
        return self._target, {}

    def _granted(self, name: str, want: int, now_s: float) -> int:
        """Return the gangs that the model may have beside the others."""
        if self._max_ranks is None:
            return want
        # Serve pickles this class by value, globals included: only the imported module is one for all policies.
        from deployments.autoscaling import DEMANDS

        rules = self._scaler.rules
        own = RankDemand(want=want, min_gangs=rules.min_gangs, num_ranks=self._num_ranks, priority=self._priority)
        DEMANDS[name] = now_s, own
        for gone in [other for other, (said_s, _) in DEMANDS.items() if now_s - said_s > REPORT_MAX_AGE_S]:
            del DEMANDS[gone]
        return share_ranks({other: demand for other, (_, demand) in DEMANDS.items()}, self._max_ranks)[name]


def observe(ctx: AutoscalingContext) -> Observation:
    """Return what the replicas of a deployment report, the oldest replica first."""
    now_s, metrics = ctx.current_time or 0.0, ctx.raw_metrics or {}
    newest: dict[Any, dict[str, float]] = {replica: {} for replica in ctx.running_replicas}
    for name in GangReport.__dataclass_fields__:
        for replica, series in metrics.get(name, {}).items():
            if replica in newest and series and now_s - series[-1].timestamp <= REPORT_MAX_AGE_S:
                newest[replica][name] = series[-1].value
    return Observation(
        now_s=now_s,
        target=ctx.target_num_replicas,
        gangs={
            replica.unique_id: GangReport(**values) if values else UNHEARD  # type: ignore[arg-type]
            for replica, values in newest.items()
        },
        num_unassigned=0.0 if newest else ctx.total_num_requests,
    )
