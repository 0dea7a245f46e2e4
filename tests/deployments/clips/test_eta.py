"""Waiting clips are predicted in their order, by the durations of similar ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import String

from deployments.clips.eta import OpenClip, clip_key, clip_times, duration_key, learn_clip, predicted_ends_s
from deployments.database.tables import ClipRow
from engines.gang.eta.measured_times import MAX_KEYS, MeasuredTimes
from pipelines.request import Lora
from pipelines.solver import Solver
from tests.deployments.clips.support.runs import REQUEST, ended, running
from tests.deployments.clips.test_claims import TIMINGS
from tests.deployments.support.fake_service import FakeService

TAKES_S = 10.0
NOW_S = 1000.0


def times_of(takes_s: float = TAKES_S) -> MeasuredTimes:
    times = clip_times()
    learn_clip(times, REQUEST, replace(TIMINGS, queue_s=3.0, total_s=3.0 + takes_s))
    return times


def queued(
    name: str, *, model: str = REQUEST.model, like: str = duration_key(REQUEST), not_before_s: float = 0.0
) -> OpenClip:
    return OpenClip(name, model, like, "queued", None, not_before_s)


def clip_under_way(name: str, eta_at_s: float | None) -> OpenClip:
    return OpenClip(name, REQUEST.model, duration_key(REQUEST), "in_progress", eta_at_s, 0.0)


@pytest.mark.parametrize(
    ("clips", "num_gangs", "expected_s"),
    [
        ([queued("a"), queued("b")], 1, {"a": 1010, "b": 1020}),
        ([clip_under_way("x", 1004.0), queued("a"), queued("b")], 1, {"x": 1004, "a": 1014, "b": 1024}),
        ([queued("a"), clip_under_way("x", 1004.0)], 1, {"x": 1004, "a": 1014}),
        ([clip_under_way("x", 1004.0), clip_under_way("y", 1007.0), queued("a")], 1, {"x": 1004, "y": 1007, "a": 1017}),
        ([clip_under_way("x", None), queued("a")], 1, {"x": 1010, "a": 1020}),
        ([queued("a"), queued("b"), queued("c")], 2, {"a": 1010, "b": 1015, "c": 1020}),
        ([queued("a", not_before_s=1030.0), queued("b")], 1, {"a": 1040, "b": 1020}),
        ([queued("a"), queued("new", like="other"), queued("b")], 1, {"a": 1010, "new": None, "b": None}),
        ([queued("new", model="other"), queued("b")], 1, {"new": None, "b": 1010}),
        ([], 1, {}),
    ],
)
def test_ends(clips: list[OpenClip], num_gangs: int, expected_s: dict[str, float | None]) -> None:
    assert predicted_ends_s(clips, times_of(), {REQUEST.model: num_gangs}, NOW_S) == expected_s


def test_the_shortest_time_counts_and_old_kinds_are_forgotten() -> None:
    times = times_of()
    key = clip_key(REQUEST.model, duration_key(REQUEST))
    for _ in range(40):
        learn_clip(times, REQUEST, replace(TIMINGS, queue_s=0.0, total_s=99.0))
    assert times.get(key) == TAKES_S
    learn_clip(times, REQUEST, replace(TIMINGS, queue_s=1.0, total_s=0.99 + TAKES_S))
    assert times.get(key) == pytest.approx(TAKES_S - 0.01)
    for number in range(MAX_KEYS):
        learn_clip(times, replace(REQUEST, num_inference_steps=1000 + number), TIMINGS)
    assert times.get(key) is None


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({}, "48x32x5 steps=4 branches=2 cache=off"),
        ({"sound": False, "true_cfg_scale": 1.0}, "48x32x5 silent steps=4 branches=1 cache=off"),
        ({"cache": "fast", "num_video_frames": 5}, "48x32x5 steps=4 branches=2 cache=fast clip"),
        (
            {"solver": Solver(guidance_scale_2=3.5), "attention": "fp8", "num_video_frames": 5},
            "48x32x5 steps=4 branches=2 cache=off experts=3.5,- clip fp8",
        ),
        ({"solver": Solver(boundary_ratio=0.875)}, "48x32x5 steps=4 branches=2 cache=off experts=-,0.875"),
        ({"loras": (Lora(name="ink"),), "num_pictures": 2}, "48x32x5 steps=4 branches=2 cache=off"),
        ({"num_pictures": 9, "num_video_frames": 13}, "48x32x5 steps=4 branches=2 cache=off clip=13 pictures=9"),
    ],
)
def test_keys_are_those_in_databases(changes: dict[str, Any], key: str) -> None:
    """An updated server finds the clips it made before."""
    request = replace(REQUEST, width=48, height=32, num_frames=5, num_inference_steps=4, true_cfg_scale=6.0)
    assert duration_key(replace(request, **changes)) == key


def test_what_takes_another_time_is_not_alike() -> None:
    changes = [{"width": 64}, {"num_frames": 9}, {"num_inference_steps": 5}, {"true_cfg_scale": 1.0}, {"cache": "fast"}]
    changes += [{"num_video_frames": 9}, {"num_video_frames": 13}, {"num_pictures": 3}, {"num_pictures": 9}]
    changes += [{"attention": "fp8"}]
    kinds = {duration_key(REQUEST), *(duration_key(replace(REQUEST, **change)) for change in changes)}  # type: ignore[arg-type]
    assert len(kinds) == 1 + len(changes)
    assert duration_key(replace(REQUEST, seed=1, prompt="other", true_cfg_scale=7.0)) == duration_key(REQUEST)


def test_the_longest_key_fits_its_column() -> None:
    solver = Solver(guidance_scale_2=1.2345678901234567e-05, boundary_ratio=1.2345678901234567e-05)
    sizes: dict[str, Any] = {
        "width": 16384,
        "height": 16384,
        "num_frames": 3600,
        "num_inference_steps": 1000,
        "num_video_frames": 3599,
        "num_pictures": 16,
    }
    longest = replace(REQUEST, **sizes, sound=False, cache="conservative", attention="auto", solver=solver)
    column = ClipRow.__table__.c.alike.type
    assert isinstance(column, String)
    assert column.length is not None
    assert len(duration_key(longest)) <= column.length


async def test_what_was_made_before_a_restart_is_known(tmp_path: Path, clock: SimpleNamespace) -> None:
    service = FakeService()
    async with running(service, tmp_path) as clips:
        before = await ended(clips, (await clips.submit(REQUEST, "1")).id)
    service.reasons["fake-clips"] = "loading"
    async with running(service, tmp_path) as clips:
        clip = await clips.submit(REQUEST, "1")
    assert before.timings is not None
    assert clip.eta_at_s == pytest.approx(clock.now_s + before.timings.total_s - before.timings.queue_s)
