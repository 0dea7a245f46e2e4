"""Step times are measured, stored and found again, and they correct the estimates of other shapes."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.gang.eta.measured_times import StepTimes
from engines.gang.eta.prediction import USUAL_MOVE_S, USUAL_SWITCH_S, StepPrediction, rough_step_s
from engines.gang.jobs.job import Job

SHAPE = (1024, 1024, 1, False, (("prompt_embeds", (1, 512, 4096)),))


def job(shape: object = SHAPE, **estimates_s: float) -> Job:
    sizes = {int(name.removeprefix("on_")): s for name, s in estimates_s.items()}
    return Job(job_id="a", request=None, conditioning=None, num_steps=28, shape=shape, estimates_s=sizes)


def hear(times: StepTimes, one: Job, team_size: int, *step_s: float) -> bool:
    for each in step_s:
        times.hear_step(one, team_size, each)
    return times.changed()


def test_the_median_is_kept_and_found_again_by_the_next_gang(tmp_path: Path) -> None:
    file = tmp_path / "times" / "model.json"
    times = StepTimes(file)
    assert hear(times, job(), 2, 0.066, 0.068, 0.9)
    times.save()
    again = StepTimes(file).prediction()
    assert again.step_s(job(), 2) == times.prediction().step_s(job(), 2) == 0.068
    assert again.is_measured(job(), 2)
    assert not again.is_measured(job(), 1)


def test_estimates_are_corrected_by_what_was_measured() -> None:
    """Steps take half as long here as the estimates say."""
    times = StepTimes()
    hear(times, job("small", on_1=0.2), 1, 0.1, 0.1)
    prediction = times.prediction()
    assert prediction.step_s(job("large", on_1=1.6), 1) == pytest.approx(0.8)
    assert prediction.step_s(job("large", on_1=1.6), 2) == pytest.approx(0.8 / 2**0.8)


def test_what_estimates_were_wrong_by_is_kept(tmp_path: Path) -> None:
    """A rebuilt gang scales the estimates of shapes it never ran like the gang before it."""
    times = StepTimes(tmp_path / "model.json")
    hear(times, job("small", on_1=0.2), 2, 0.1, 0.1)
    times.save()
    large, before, after = job("large", on_1=1.6), times.prediction(), StepTimes(tmp_path / "model.json").prediction()
    assert before.step_s(large, 2) == after.step_s(large, 2) == pytest.approx(0.8)
    assert after.knows(large)


def test_what_is_a_guess() -> None:
    times = StepTimes()
    assert not times.prediction().knows(job())
    assert not times.prediction().knows(job(on_1=0.2))
    hear(times, job("seen", on_1=0.2), 2, 0.1, 0.1)
    prediction = times.prediction()
    assert prediction.knows(job("seen")), "its shape, whatever is estimated"
    assert [prediction.knows(job("other", on_1=0.2 * factor)) for factor in (0.1, 0.2, 1, 7, 9)] == [
        False, True, True, True, False
    ]  # fmt: skip
    assert not prediction.knows(job("other"))


def test_another_team_of_a_measured_shape_goes_by_the_estimates() -> None:
    prediction = StepPrediction(measured={(repr(SHAPE), 2): 0.07})
    assert prediction.step_s(job(on_1=1.0, on_2=0.5), 1) == pytest.approx(0.14)
    assert prediction.step_s(job(), 1) == pytest.approx(0.07 * 2**0.8)


def test_a_job_of_which_nothing_is_known_takes_the_usual_time() -> None:
    times = StepTimes()
    assert times.prediction().step_s(job(None), 1) == 1.0
    hear(times, job(), 1, 0.03, 0.03)
    assert times.prediction().step_s(job(None), 1) == pytest.approx(0.03)


def test_what_a_move_takes_is_kept_and_no_time_of_a_step(tmp_path: Path) -> None:
    times = StepTimes(tmp_path / "model.json")
    hear(times, job(), 1, 0.03, 0.03)
    assert times.prediction().move_s == USUAL_MOVE_S
    for move_s in (0.004, 0.006, 0.1):
        times.hear_move(move_s)
    assert times.changed()
    times.save()
    for prediction in (times.prediction(), StepTimes(tmp_path / "model.json").prediction()):
        assert prediction.move_s == 0.006
        assert list(prediction.measured) == [(repr(SHAPE), 1)]
        assert prediction.usual_s == pytest.approx(0.03)


def test_what_a_change_of_weights_takes_is_kept_and_no_time_of_a_step(tmp_path: Path) -> None:
    times = StepTimes(tmp_path / "model.json")
    hear(times, job(), 1, 0.03, 0.03)
    assert times.prediction().switch_s == USUAL_SWITCH_S
    for switch_s in (0.012, 0.117, 0.085):
        times.hear_switch(switch_s)
    assert times.changed()
    times.save()
    for prediction in (times.prediction(), StepTimes(tmp_path / "model.json").prediction()):
        assert prediction.switch_s == 0.085
        assert list(prediction.measured) == [(repr(SHAPE), 1)]
        assert prediction.move_s == USUAL_MOVE_S


def test_rough_estimates_grow_as_steps_do() -> None:
    """The times are steps of FLUX.1-dev on one H200 with 512 tokens of text."""
    measured_ms = {32 * 32: 35.4, 64 * 64: 121.0, 128 * 128: 730.0}
    estimates = [rough_step_s(tokens + 512) for tokens in measured_ms]
    ratios = [ms / estimate for ms, estimate in zip(measured_ms.values(), estimates, strict=True)]
    assert max(ratios) / min(ratios) < 1.1
