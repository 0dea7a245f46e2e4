"""What steps took, as they were measured; in a file, so that a gang that is rebuilt predicts what it did before."""

from __future__ import annotations

import logging
from pathlib import Path
from statistics import median

from engines.gang.eta.measured_times import KeptTimes
from engines.gang.eta.prediction import (
    USUAL_MOVE_S,
    StepPrediction,
    estimated_s,
    scale_of,
    shape_name,
    speedup,
)
from engines.gang.jobs.job import Job

logger = logging.getLogger(__name__)

NUM_NEEDED = 2
"""Below that many a median says nothing."""

MOVE = ("a move", 0)
"""Among the kinds of times. Named as no shape is, whose ``repr`` would have quotation marks."""


class StepTimes(KeptTimes):
    """By shape and team size, each beside what its job estimated; and what it takes to bring a job to other ranks."""

    def __init__(self, file: Path | None = None) -> None:
        super().__init__(file, "steps", num_first=NUM_NEEDED, num_needed=NUM_NEEDED)

    def note(self, job: Job, team_size: int, step_s: float) -> None:
        """Hears of a step that found all ready, and began as the one before it of the same job ended."""
        if job.shape is not None and step_s > 0:
            self.hear((shape_name(job.shape), team_size), step_s, estimated_s(job, team_size))

    def note_move(self, move_s: float) -> None:
        """Hears how long the ranks of a gang were at a job's state, from when the last of them was there."""
        self.hear(MOVE, move_s)

    def changed(self) -> bool:
        """Returns whether what was heard since makes another prediction, which it is from then on."""
        news = self.update()
        if news:
            told = {f"{name} on {team_size}": step_s for (name, team_size), step_s in sorted(news.items())}
            logger.info("steps are predicted anew", extra={"step_s": told})
        return bool(news)

    def prediction(self) -> StepPrediction:
        """Returns what follows from all that is known."""
        known = self.known
        move_s, _ = known.pop(MOVE, (USUAL_MOVE_S, None))
        usual = [step_s * speedup(team_size) for (_, team_size), (step_s, _) in known.items()]
        return StepPrediction(
            measured={key: step_s for key, (step_s, _) in known.items()},
            estimated={key: estimate_s for key, (_, estimate_s) in known.items() if estimate_s},
            scale=scale_of((step_s, estimate_s) for step_s, estimate_s in known.values() if estimate_s),
            usual_s=median(usual) if usual else 1.0,
            move_s=move_s,
        )
