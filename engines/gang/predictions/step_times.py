"""What steps took, as they were measured; in a file, so that a gang that is rebuilt predicts what it did before."""

from __future__ import annotations

import json
import logging
from collections import defaultdict, deque
from pathlib import Path
from statistics import median

from engines.core.storage.files import write_atomically
from engines.gang.jobs.job import Job
from engines.gang.predictions.prediction import StepKey, StepPrediction, estimated_s, scale_of, shape_name, speedup

logger = logging.getLogger(__name__)

NUM_KEPT = 32
"""Newest times of a shape on a team of a size, whose median counts."""
NUM_NEEDED = 2
"""Below that many a median says nothing."""
MIN_CHANGE = 0.1
"""A time that is known is replaced only by one that differs by so much, so that decisions stay what they were."""


_Kept = tuple[float, float | None]
"""Seconds of a step: as measured, and as its job estimated them."""


class StepTimes:
    """``file`` has them in seconds, by shape and team size, each beside what its job estimated; it is made when there
    is something to keep, and belongs to one machine, model and software (its name should say which). None keeps them in
    memory alone.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        kept = {} if file is None else _read(file)
        self._known: dict[StepKey, float] = {key: step_s for key, (step_s, _) in kept.items()}
        self._estimated: dict[StepKey, float] = {key: estimate_s for key, (_, estimate_s) in kept.items() if estimate_s}
        self._times: defaultdict[StepKey, deque[float]] = defaultdict(lambda: deque(maxlen=NUM_KEPT))

    def note(self, job: Job, team_size: int, step_s: float) -> None:
        """Hears of a step that found all ready, and began as the one before it of the same job ended."""
        if job.shape is not None and step_s > 0:
            key = (shape_name(job.shape), team_size)
            self._times[key].append(step_s)
            if estimate_s := estimated_s(job, team_size):
                self._estimated[key] = estimate_s

    def changed(self) -> bool:
        """Returns whether what was heard since makes another prediction, which it is from then on."""
        news = {
            key: round(median(times), 6)
            for key, times in self._times.items()
            if len(times) >= NUM_NEEDED and self._differs(key, median(times))
        }
        self._known |= news
        if news:
            told = {f"{name} on {team_size}": step_s for (name, team_size), step_s in sorted(news.items())}
            logger.info("steps are predicted anew", extra={"step_s": told})
        return bool(news)

    def save(self) -> None:
        """Writes the file, with what others have written there meanwhile; waits for the disk."""
        if self._file is not None:
            try:
                write_atomically(self._file, json.dumps(_nested(_read(self._file) | self._kept()), indent=1).encode())
            except OSError as error:  # it is measured again the next time
                logger.warning("the times of steps cannot be kept in %s: %s", self._file, error)

    def prediction(self) -> StepPrediction:
        """Returns what follows from all that is known."""
        estimated = {key: estimate_s for key, estimate_s in self._estimated.items() if key in self._known}
        usual = [step_s * speedup(team_size) for (_, team_size), step_s in self._known.items()]
        return StepPrediction(
            measured=dict(self._known),
            estimated=estimated,
            scale=scale_of((self._known[key], estimate_s) for key, estimate_s in estimated.items()),
            usual_s=median(usual) if usual else 1.0,
        )

    def _kept(self) -> dict[StepKey, _Kept]:
        return {key: (step_s, self._estimated.get(key)) for key, step_s in self._known.items()}

    def _differs(self, key: StepKey, step_s: float) -> bool:
        known_s = self._known.get(key)
        return known_s is None or abs(step_s - known_s) > MIN_CHANGE * known_s


def _nested(kept: dict[StepKey, _Kept]) -> dict[str, dict[str, _Kept]]:
    nested: defaultdict[str, dict[str, _Kept]] = defaultdict(dict)
    for (name, team_size), times_s in sorted(kept.items(), key=lambda entry: entry[0]):
        nested[name][str(team_size)] = times_s
    return nested


def _read(file: Path) -> dict[StepKey, _Kept]:
    """Returns what was kept; nothing where there is no such file, or none that can be read."""
    if not file.is_file():
        return {}
    try:
        nested = json.loads(file.read_text())
        return {
            (name, int(size)): (float(step_s), None if estimate_s is None else float(estimate_s))
            for name, by_size in nested.items()
            for size, (step_s, estimate_s) in by_size.items()
        }
    except (OSError, ValueError, AttributeError, TypeError) as error:
        logger.warning("%s holds no times of steps (%s): they are measured anew", file, error)
        return {}
