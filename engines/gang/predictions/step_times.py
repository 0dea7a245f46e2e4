"""What steps took, as they were measured; in a file, so that a gang that is rebuilt predicts what it did before."""

from __future__ import annotations

import json
import logging
from collections import defaultdict, deque
from pathlib import Path
from statistics import median

from engines.core.files import write_atomically
from engines.gang.job import Job
from engines.gang.predictions.prediction import StepKey, StepPrediction, scale_of, shape_name, speedup

logger = logging.getLogger(__name__)

NUM_KEPT = 32
"""Newest times of a shape on a team of a size, whose median counts."""
NUM_NEEDED = 2
"""Below that many a median says nothing."""
MIN_CHANGE = 0.1
"""A time that is known is replaced only by one that differs by so much, so that decisions stay what they were."""


class StepTimes:
    """``file`` has them in seconds, by shape and team size; it is made when there is something to keep, and belongs to
    one machine, model and software (its name should say which). None keeps them in memory alone.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._known: dict[StepKey, float] = {} if file is None else _read(file)
        self._estimated: dict[StepKey, float] = {}
        self._times: defaultdict[StepKey, deque[float]] = defaultdict(lambda: deque(maxlen=NUM_KEPT))

    def note(self, job: Job, team_size: int, step_s: float) -> None:
        """Hears of a step that found all ready, and began as the one before it of the same job ended."""
        if job.shape is not None and step_s > 0:
            key = (shape_name(job.shape), team_size)
            self._times[key].append(step_s)
            if team_size in job.estimates_s:
                self._estimated[key] = job.estimates_s[team_size]

    def changed(self) -> bool:
        """Returns whether what was heard since makes another prediction, which it is from then on."""
        news = {
            key: round(median(times), 6)
            for key, times in self._times.items()
            if len(times) >= NUM_NEEDED and self._differs(key, median(times))
        }
        self._known |= news
        return bool(news)

    def save(self) -> None:
        """Writes the file, with what others have written there meanwhile; waits for the disk."""
        if self._file is not None:
            try:
                write_atomically(self._file, json.dumps(_nested(_read(self._file) | self._known), indent=1).encode())
            except OSError as error:  # it is measured again the next time
                logger.warning("the times of steps cannot be kept in %s: %s", self._file, error)

    def prediction(self) -> StepPrediction:
        """Returns what follows from all that is known."""
        scale = scale_of(
            (self._known[key], estimate_s) for key, estimate_s in self._estimated.items() if key in self._known
        )
        usual = [step_s * speedup(team_size) for (_, team_size), step_s in self._known.items()]
        return StepPrediction(measured=dict(self._known), scale=scale, usual_s=median(usual) if usual else 1.0)

    def _differs(self, key: StepKey, step_s: float) -> bool:
        known_s = self._known.get(key)
        return known_s is None or abs(step_s - known_s) > MIN_CHANGE * known_s


def _nested(known: dict[StepKey, float]) -> dict[str, dict[str, float]]:
    nested: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for (name, team_size), step_s in sorted(known.items()):
        nested[name][str(team_size)] = step_s
    return nested


def _read(file: Path) -> dict[StepKey, float]:
    """Returns what was kept; nothing where there is no such file, or none that can be read."""
    if not file.is_file():
        return {}
    try:
        nested = json.loads(file.read_text())
        return {(name, int(size)): float(s) for name, by_size in nested.items() for size, s in by_size.items()}
    except (OSError, ValueError, AttributeError) as error:
        logger.warning("%s holds no times of steps (%s): they are measured anew", file, error)
        return {}
