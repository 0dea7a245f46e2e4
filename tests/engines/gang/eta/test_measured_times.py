"""Measured times are stored and found again when several gangs write to one folder."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from engines.core.storage import write_atomically
from engines.gang.eta import measured_times
from engines.gang.eta.measured_times import MAX_KEYS, MeasuredTimes, TimeKey

ONE, OTHER = ("png", 64), ("png", 128)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "times" / "m.json"


def times_in(file: Path | None, num_needed: int = 1) -> MeasuredTimes:
    return MeasuredTimes(file, "tests", num_needed=num_needed)


def heard(times: MeasuredTimes, key: TimeKey, *seconds: float) -> dict[TimeKey, float]:
    for each in seconds:
        times.hear(key, each)
    return times.update()


def test_the_median_is_kept_with_what_was_estimated(file: Path) -> None:
    times = times_in(file)
    times.hear(ONE, 0.5, 0.25)
    assert heard(times, OTHER, 0.1, 0.9, 0.2) == {ONE: 0.5, OTHER: 0.2}
    times.save()
    assert times_in(file).known == times.known == {ONE: (0.5, 0.25), OTHER: (0.2, None)}


def test_what_is_known_stays_until_it_is_wrong_by_a_tenth() -> None:
    times = times_in(None, num_needed=3)
    assert heard(times, ONE, 0.1) == {ONE: 0.1}
    assert heard(times, ONE, 0.5) == {}, "too few to correct it"
    assert heard(times, ONE, *[0.105] * 20) == {}
    assert heard(times, ONE, *[0.12] * 32) == {ONE: 0.12}


def test_two_keep_what_both_measured(file: Path) -> None:
    both = [times_in(file), times_in(file)]
    for times, key in zip(both, (ONE, OTHER), strict=True):
        heard(times, key, 0.1)
    for times in both:
        times.save()
    assert times_in(file).known.keys() == {ONE, OTHER}


def test_a_time_that_was_only_read_does_not_replace_a_newer_one(file: Path) -> None:
    heard(first := times_in(file), ONE, 0.1)
    first.save()
    readers = [times_in(file), times_in(file)]
    for times, key, seconds in zip(readers, (ONE, OTHER), (0.5, 0.2), strict=True):
        heard(times, key, seconds)
        times.save()
    assert {key: time_s for key, (time_s, _) in times_in(file).known.items()} == {ONE: 0.5, OTHER: 0.2}


@pytest.mark.parametrize(
    "text", ["no JSON", "[1, 2]", '{"png": 3}', '{"png": {"many": [1.0, null]}}', '{"png": {"64": 1.0}}']
)
def test_what_cannot_be_read_is_measured_anew(file: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    file.parent.mkdir()
    file.write_text(text)
    times = times_in(file)
    assert (times.known, "holds no times of tests" in caplog.text) == ({}, True)
    heard(times, ONE, 0.1)
    times.save()
    assert times_in(file).known == {ONE: (0.1, None)}


@pytest.mark.parametrize("place", ["taken/m.json", f"{'m' * 300}.json"])
def test_a_place_that_takes_no_file_costs_a_line_in_the_log(
    tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "taken").touch()
    times = times_in(tmp_path / place)
    heard(times, ONE, 0.1)
    times.save()
    assert "cannot be written" in caplog.text
    assert times.known == {ONE: (0.1, None)}


def test_of_too_many_keys_those_that_changed_last_are_kept(file: Path) -> None:
    times = times_in(file)
    for number in range(MAX_KEYS + 1):
        heard(times, ("png", number), 0.1)
        times.hear(("png", 1), 0.1 + number)
    times.save()
    last = {("png", number) for number in (1, *range(3, MAX_KEYS + 1))}
    assert times.known.keys() == times_in(file).known.keys() >= last
    assert len(times.known) == MAX_KEYS


def test_they_are_written_while_others_come(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file holds what was known when the write began, and no caller waits for the disk."""
    times, others = times_in(file), times_in(file)
    heard(times, ONE, 0.1)
    write, come = write_atomically, iter([OTHER])

    def slow_write(path: Path, data: bytes) -> None:
        for key in come:
            thread = threading.Thread(target=heard, args=(times, key, 0.2))
            thread.start()
            thread.join()
        write(path, data)

    monkeypatch.setattr(measured_times, "write_atomically", slow_write)
    times.save()
    assert times_in(file).known.keys() == {ONE}
    others.save()
    times.save()
    assert times_in(file).known.keys() == times.known.keys() == {ONE, OTHER}


def test_a_time_of_another_number_is_in_proportion_to_the_nearest() -> None:
    times = times_in(None)
    assert times.scaled_s(ONE) is None
    assert times.learn(ONE, 0.5)
    assert times.learn(("png", 1024), 3.0)
    assert (times.get(ONE), times.get(OTHER)) == (0.5, None)
    assert (times.scaled_s(ONE), times.scaled_s(OTHER), times.scaled_s(("png", 2048))) == (0.5, 1.0, 6.0)
    assert times.scaled_s(("webp", 64)) is None


def test_the_shortest_time_may_count() -> None:
    times = MeasuredTimes(None, "tests", shortest=True)
    assert [times.learn(ONE, time_s) for time_s in (0.5, 0.6, *[0.7] * 40, 0.49)] == [True, *[False] * 41, True]
    assert times.get(ONE) == 0.49
