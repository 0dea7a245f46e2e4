"""What it takes to bring a job's state to other ranks, put together from what all of them tell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from engines.gang.eta.step_times import StepTimes
from engines.gang.jobs.step_plan import StepReport


class Moves:
    """All of ``num_ranks`` ranks meet for the moves of a plan. The last one to come waits for no other, so the shortest
    time that is told is what they took: ``step_times`` hears it."""

    def __init__(self, num_ranks: int, step_times: StepTimes) -> None:
        self._num_ranks, self._step_times = num_ranks, step_times
        self._told_ms: defaultdict[int, list[float]] = defaultdict(list)
        """By the sequence of the plan, as long as not all ranks have told."""

    def hear(self, reports: Iterable[StepReport]) -> None:
        for report in reports:
            if report.move_ms:
                told_ms = self._told_ms[report.sequence]
                told_ms.append(report.move_ms)
                if len(told_ms) == self._num_ranks:
                    del self._told_ms[report.sequence]
                    self._step_times.note_move(min(told_ms) / 1e3)
