"""What is made of the times that ranks tell of moves."""

from __future__ import annotations

from engines.gang.eta.moves import Moves
from engines.gang.eta.prediction import USUAL_MOVE_S
from engines.gang.eta.step_times import StepTimes
from engines.gang.jobs.step_plan import StepReport


def told(sequence: int, **move_ms: float) -> list[StepReport]:
    return [
        StepReport(rank=int(rank.removeprefix("rank")), sequence=sequence, move_ms=each)
        for rank, each in move_ms.items()
    ]


def test_the_rank_that_waited_for_none_tells_what_moves_took() -> None:
    """Ranks of two teams report at their own times, and plans without moves between them."""
    times = StepTimes()
    moves = Moves(3, times)
    moves.hear(told(2, rank0=70.0, rank1=4.0))
    moves.hear(told(4, rank0=3.0, rank1=30.0, rank2=3.5))
    moves.hear(told(3, rank0=0.0, rank1=0.0, rank2=0.0))
    assert not times.changed(), "one is not enough, and the others have not told of the second"
    assert times.prediction().move_s == USUAL_MOVE_S
    moves.hear(told(2, rank2=500.0))
    assert times.changed()
    assert times.prediction().move_s == 0.0035
