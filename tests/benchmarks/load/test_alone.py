"""What classes take alone is measured once, and kept; other team sizes follow from the application's own times."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from pydantic import ValidationError

from benchmarks.load import alone
from benchmarks.load.alone import Alone, rank_seconds, read, told, with_ratios
from engines.gang.eta.measured_times import StepTimes
from engines.gang.eta.prediction import speedup
from engines.gang.jobs.job import Job

SMALL = Alone(model="one", num_steps=10, step_s=0.1, other_s=0.5, num_ranks=2, width=64, height=64)
CLIP = SMALL.model_copy(update={"num_frames": 0, "ratios": {1: 1.5}})


def test_what_was_printed_is_read_whole_in_part_and_at_the_end_of_output(tmp_path: Path) -> None:
    known, file = {"small": SMALL, "clip": CLIP}, tmp_path / "file"
    document = json.dumps({"rows": [], "alone": told(known)})
    for text in (document, json.dumps(told(known), indent=1), f"{json.dumps({'row': 1})}\n{document}\n"):
        file.write_text(text)
        assert read(file) == known
    file.write_text(json.dumps({"small": {"step_s": 1.0}}))
    with pytest.raises(ValidationError):
        read(file)
    file.write_text("")
    with pytest.raises(ValueError, match="Expecting value"):
        read(file)


def test_steps_of_other_teams_have_the_usual_speedup_unless_they_were_measured() -> None:
    assert SMALL.lone_s == pytest.approx(1.5)
    assert SMALL.by_size((1, 2)) == pytest.approx({1: 0.1 * speedup(2), 2: 0.1})
    assert CLIP.by_size((1, 2)) == pytest.approx({1: 0.15, 2: 0.1})


def kept(file: Path, *entries: tuple[object, int, float]) -> None:
    times = StepTimes(file)
    for shape, num_ranks, step_s in 2 * entries:
        times.hear_step(Job(job_id="j", request=None, conditioning=None, num_steps=1, shape=shape), num_ranks, step_s)
    times.changed()
    times.save()


def test_ratios_are_those_of_the_size_in_the_models_newest_file(tmp_path: Path) -> None:
    kept(tmp_path / "one_00ff.json", ((64, 64, 1, False, (("p", (1, 9)),)), 1, 0.9))
    newest = tmp_path / "one_11ff.json"
    short, long = ((64, 64, 1, False, (("p", (1, tokens)),)) for tokens in (8, 9))
    clip = (64, 64, 5, False, ())
    kept(newest, (short, 1, 0.3), (short, 2, 0.2), (long, 1, 0.5), (long, 2, 0.2), (clip, 1, 9.0), (clip, 2, 1.0))
    kept(tmp_path / "one_two_22ff.json", ((64, 64, 1, False, ()), 1, 7.0))
    for number, file in enumerate((tmp_path / "one_00ff.json", newest, tmp_path / "one_two_22ff.json")):
        os.utime(file, (number, number))
    wide = SMALL.model_copy(update={"width": 128})
    found = with_ratios({"small": SMALL, "wide": wide, "clip": CLIP}, tmp_path)
    assert found["small"].ratios == pytest.approx({1: 2.0}), "the median of 1.5 and 2.5, and none of the clip's"
    assert found["wide"].ratios == {}
    assert found["clip"].ratios == pytest.approx({1: 2.5}), "of 1.5, 2.5 and 9"
    assert with_ratios({"clip": CLIP}, tmp_path / "nothing")["clip"].ratios == {1: 1.5}


def test_ranks_of_a_team_count_each() -> None:
    registry = CollectorRegistry()
    steps = Histogram("troupe_step_seconds", "", ("model", "num_ranks"), registry=registry)
    for num_ranks, step_s in ((1, 1.0), (2, 2.0), (2, 3.0)):
        steps.labels("one", num_ranks).observe(step_s)
    found = rank_seconds(generate_latest(registry).decode())
    assert found == {("one", 1): 1.0, ("one", 2): 10.0}
    assert alone._busiest({("one", 2): 9.5}, found, "one") == 1
    assert alone._busiest({}, found, "one") == 2
    assert alone._busiest({}, {}, "one") == 0, "without metrics"
