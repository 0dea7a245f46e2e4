"""Measured times by key, in a file, so that they survive a restart."""

from __future__ import annotations

import json
import logging
import threading
from collections import defaultdict, deque
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from engines.core.storage import write_atomically
from engines.gang.eta.prediction import (
    USUAL_MOVE_S,
    USUAL_SWITCH_S,
    StepPrediction,
    estimated_s,
    scale_of,
    shape_name,
    speedup,
)
from engines.gang.jobs.job import Job

logger = logging.getLogger(__name__)

NUM_NEWEST = 32
"""Newest times of a key, whose median counts."""
MIN_CHANGE = 0.1
"""A known time changes only if a new one differs by more than this fraction, so that decisions stay stable."""
MAX_KEYS = 1000
"""Limit of stored keys: sizes and prompt lengths are unbounded. The last changed ones stay."""
NUM_STEPS_NEEDED = 2
"""Fewest times of a step for a median."""

TimeKey = tuple[str, int]
"""Subject of a measurement: a name and a number."""

MeasuredTime = tuple[float, float | None]
"""Measured seconds, and their estimate if there was one."""


class MeasuredTimes:
    """A time is known after ``num_first`` measurements, and corrected after ``num_needed``. Thread-safe."""

    def __init__(
        self, file: Path | None, what: str, *, num_first: int = 1, num_needed: int = 1, shortest: bool = False
    ) -> None:
        """Read ``file``, which is for one machine, model and software, as its name should say; None: in memory only.

        ``what`` names the times in the log. ``shortest``: the shortest time counts, not the median of the newest.
        """
        self._file, self._what, self._shortest = file, what, shortest
        self._num_first, self._num_needed = num_first, num_needed
        self._known = self._read()
        self._changed: set[TimeKey] = set()
        """Keys whose times were measured here; another process may have written newer times of the others."""
        self._newest: defaultdict[TimeKey, deque[float]] = defaultdict(lambda: deque(maxlen=NUM_NEWEST))
        self._estimates: dict[TimeKey, float | None] = {}
        """Estimates of the keys measured since the last update."""
        self._lock, self._writing = threading.Lock(), threading.Lock()

    @property
    def known(self) -> dict[TimeKey, MeasuredTime]:
        with self._lock:
            return dict(self._known)

    def get(self, key: TimeKey) -> float | None:
        """Return the known seconds of ``key``."""
        time_s, _ = self.known.get(key, (None, None))
        return time_s

    def scaled_s(self, key: TimeKey) -> float | None:
        """Return the seconds of ``key`` in proportion to the nearest number of its name; None if that is unknown."""
        name, number = key
        known = {other: time_s for (of, other), (time_s, _) in self.known.items() if of == name}
        if not known:
            return None
        nearest = min(known, key=lambda other: abs(other - number))
        return known[nearest] * number / nearest

    def hear(self, key: TimeKey, time_s: float, estimate_s: float | None = None) -> None:
        """Record a time, which counts from the next ``update`` on."""
        with self._lock:
            self._newest[key].append(time_s)
            self._estimates[key] = estimate_s

    def learn(self, key: TimeKey, time_s: float) -> bool:
        """Record a time and update at once. Return whether a known time changed."""
        self.hear(key, time_s)
        return bool(self.update())

    def update(self) -> dict[TimeKey, float]:
        """Apply the recorded times. Return the changed ones."""
        with self._lock:
            times_s = {key: self._time_s(key) for key in self._estimates}
            news = {key: time_s for key, time_s in times_s.items() if self._is_news(key, time_s)}
            self._known = _merged(self._known, {key: (time_s, self._estimates[key]) for key, time_s in news.items()})
            self._changed.update(news)
            self._estimates.clear()
            for key in [*self._newest][:-MAX_KEYS]:
                del self._newest[key]
            return news

    def save(self) -> None:
        """Write the file, merged with times that other processes wrote meanwhile. Blocks on the disk."""
        if self._file is None:
            return
        with self._writing:
            nested: defaultdict[str, dict[str, MeasuredTime]] = defaultdict(dict)
            known = self.known
            own = {key: time for key, time in known.items() if key in self._changed}
            for (name, number), time in _merged(_merged(known, self._read()), own).items():
                nested[name][str(number)] = time
            try:
                write_atomically(self._file, json.dumps(nested, indent=1).encode())
            except OSError as error:  # measured again after the next start
                logger.warning("the times of %s cannot be written to %s: %s", self._what, self._file, error)

    def _time_s(self, key: TimeKey) -> float:
        return round(min(self._newest[key]) if self._shortest else median(self._newest[key]), 6)

    def _is_news(self, key: TimeKey, time_s: float) -> bool:
        num_times = len(self._newest[key])
        if key not in self._known:
            return num_times >= self._num_first
        known_s, _ = self._known[key]
        if self._shortest:
            return time_s < known_s
        return num_times >= self._num_needed and abs(time_s - known_s) > MIN_CHANGE * known_s

    def _read(self) -> dict[TimeKey, MeasuredTime]:
        """Return the file's times; none if it is missing or unreadable."""
        try:
            nested = {} if self._file is None else json.loads(self._file.read_text())
            return {
                (name, int(number)): (float(time_s), None if estimate_s is None else float(estimate_s))
                for name, by_number in nested.items()
                for number, (time_s, estimate_s) in by_number.items()
            }
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError, TypeError) as error:
            logger.warning("%s holds no times of %s (%s): they are measured again", self._file, self._what, error)
            return {}


def _merged(old: Mapping[TimeKey, MeasuredTime], new: Mapping[TimeKey, MeasuredTime]) -> dict[TimeKey, MeasuredTime]:
    """Return both, the new ones last, without the oldest beyond ``MAX_KEYS``."""
    both = [*((key, time) for key, time in old.items() if key not in new), *new.items()]
    return dict(both[-MAX_KEYS:])


class StepTimes(MeasuredTimes):
    """Times of steps by shape and team size, with their jobs' estimates, and of changes of teams and of weights."""

    MOVE, SWITCH = ("a move", 0), ("a switch of additions", 0)
    """Keys of both changes. They are no shapes' names, because a ``repr`` has quotation marks."""

    def __init__(self, file: Path | None = None) -> None:
        super().__init__(file, "steps", num_first=NUM_STEPS_NEEDED, num_needed=NUM_STEPS_NEEDED)

    def hear_step(self, job: Job, team_size: int, step_s: float) -> None:
        """Record the time of a warm step that began when the previous step of the same job ended."""
        if job.shape is not None and step_s > 0:
            self.hear((shape_name(job.shape), team_size), step_s, estimated_s(job, team_size))

    def hear_move(self, move_s: float) -> None:
        """Record the time of a move, from when the gang's last rank was ready for it."""
        self.hear(self.MOVE, move_s)

    def hear_switch(self, switch_s: float) -> None:
        """Record the time of a change of additions to the weights, on the slowest rank of a team."""
        self.hear(self.SWITCH, switch_s)

    def changed(self) -> bool:
        """Apply the recorded times. Return whether the prediction changed."""
        news = self.update()
        if news:
            times_s = {f"{name} on {team_size}": step_s for (name, team_size), step_s in sorted(news.items())}
            logger.info("the prediction of steps has changed", extra={"step_s": times_s})
        return bool(news)

    def prediction(self) -> StepPrediction:
        """Return the prediction from all known times."""
        known = self.known
        move_s, _ = known.pop(self.MOVE, (USUAL_MOVE_S, None))
        switch_s, _ = known.pop(self.SWITCH, (USUAL_SWITCH_S, None))
        one_rank_s = [step_s * speedup(team_size) for (_, team_size), (step_s, _) in known.items()]
        return StepPrediction(
            measured={key: step_s for key, (step_s, _) in known.items()},
            estimated={key: estimate_s for key, (_, estimate_s) in known.items() if estimate_s},
            scale=scale_of((step_s, estimate_s) for step_s, estimate_s in known.values() if estimate_s),
            usual_s=median(one_rank_s) if one_rank_s else 1.0,
            move_s=move_s,
            switch_s=switch_s,
        )
