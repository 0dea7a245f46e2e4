"""When jobs will be done: predicted by going through their steps, team by team."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engines.gang.policies.candidate import Candidate, GangShape


@dataclass(slots=True)
class _Running:
    candidate: Candidate
    team_size: int
    num_left: float

    @property
    def left_s(self) -> float:
        return self.num_left * self.candidate.step_s[self.team_size]

    def go_on(self, by_s: float) -> None:
        self.num_left -= by_s / self.candidate.step_s[self.team_size]


def finish_times_s(
    seated: Iterable[tuple[Candidate, int]], waiting: Sequence[Candidate], gang: GangShape
) -> dict[str, float]:
    """Returns when each job is done, in seconds from now, by its id.

    ``seated`` run now, each on a team of that size; ``waiting`` get the teams that become free, in their order. When
    none waits, those that are left share the gang evenly, as far as that makes their teams larger.
    """
    running = [_Running(candidate, size, candidate.num_left) for candidate, size in seated]
    queue, times_s, now_s = deque(waiting), {}, 0.0
    while running:
        first = min(running, key=lambda one: one.left_s)
        by_s = first.left_s
        now_s += by_s
        for one in running:
            one.go_on(by_s)
        running.remove(first)
        times_s[first.candidate.id] = now_s
        if queue:
            candidate = queue.popleft()
            running.append(_Running(candidate, candidate.useful_size(first.team_size), candidate.num_left))
        elif running:
            _widen(running, gang)
    return times_s


def _widen(running: Sequence[_Running], gang: GangShape) -> None:
    share = gang.num_ranks // len(running)
    size = max((size for size in gang.team_sizes if size <= share), default=min(gang.team_sizes))
    for one in running:
        one.team_size = one.candidate.useful_size(max(size, one.team_size))
