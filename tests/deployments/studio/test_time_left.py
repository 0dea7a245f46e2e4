"""What is left of a job, where all steps take alike and where some make no forwards."""

from __future__ import annotations

import pytest

from deployments.studio.time_left import TimeLeft
from engines.gang.job import StepDone
from pipelines.caching import computed_steps


def done(step: int, step_ms: float) -> StepDone:
    return StepDone(job_id="a", step=step, num_steps=20, step_ms=step_ms, num_ranks=1)


def test_the_last_step_says_how_long_the_others_take() -> None:
    left = TimeLeft("off")
    assert [left.eta_s(done(1, 900.0)), left.eta_s(done(2, 100.0))] == [pytest.approx(17.1), pytest.approx(1.8)]


@pytest.mark.parametrize("behind", [False, True], ids=["at once", "a report behind"])
def test_steps_without_forwards_take_nothing(behind: bool) -> None:
    left, computed = TimeLeft("fast"), computed_steps("fast", 20)
    times_ms = [100.0 * one for one in computed]
    times_ms = [100.0, *times_ms[:-1]] if behind else times_ms
    etas_s = [left.eta_s(done(step, step_ms)) for step, step_ms in enumerate(times_ms, 1)]
    left_s = [0.1 * sum(computed[step:]) for step in range(1, 21)]
    assert etas_s == pytest.approx(left_s, rel=0.2)
    assert left.eta_s(done(1, 50.0)) == pytest.approx(0.05 * (sum(computed) - 1)), "another gang began anew"
