"""How long the rest of a job will take, by the steps that it has made."""

from __future__ import annotations

from engines.gang.job import StepDone
from pipelines.caching import CacheMode, computed_steps


class TimeLeft:
    """Of one job, whose steps are told in order; when it begins anew, so does this."""

    def __init__(self, cache: CacheMode) -> None:
        self._cache = cache
        self._elapsed_s = 0.0

    def eta_s(self, done: StepDone) -> float:
        """Returns what is left in seconds, at the pace of the last step.

        Where some steps make no forwards, at the mean pace of those that do: a GPU runs a step behind its reports, so
        none of these tells which kind its time was.
        """
        step_s = done.step_ms / 1e3
        self._elapsed_s = step_s if done.step == 1 else self._elapsed_s + step_s
        computed = computed_steps(self._cache, done.num_steps)
        if all(computed):
            return step_s * (done.num_steps - done.step)
        return self._elapsed_s / sum(computed[: done.step]) * sum(computed[done.step :])
