"""Which gangs share what was measured, and what is estimated before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from deployments.config import ModelConfig
from deployments.stages.config import DenoiserConfig
from deployments.stages.gang.step_times import num_text_tokens, rough_estimate_s, step_times_of
from engines.gang.jobs.job import Job
from engines.gang.ranks.rank import RankInfo
from tests.deployments.support.fake_studio import PICTURES

JOB = Job(job_id="a", request=None, conditioning=None, num_steps=4, shape="shape")


def infos(device_name: str) -> list[RankInfo]:
    return [RankInfo(rank=rank, pid=1, node_id="", device="cuda:0", device_name=device_name) for rank in range(2)]


def model(**denoiser: object) -> ModelConfig:
    return ModelConfig(name="m", path="folder", denoiser=DenoiserConfig(**denoiser))  # type: ignore[arg-type]


def test_a_gang_predicts_what_others_like_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROUPE_DATA_DIR", str(tmp_path))
    measured = step_times_of(model(), infos("H200"))
    measured.note(JOB, 2, 0.07)
    measured.note(JOB, 2, 0.07)
    assert measured.changed()
    measured.save()
    same = step_times_of(model(max_running_jobs=9, policy="arrival", elastic=True), infos("H200"))
    assert same.prediction().step_s(JOB, 2) == 0.07
    others = (step_times_of(model(), infos("H100")), step_times_of(model(strategy="ring"), infos("H200")))
    assert [one.prediction().measured for one in others] == [{}, {}]


def test_estimates_grow_with_what_a_step_works_on() -> None:
    small = PICTURES.request(model="m", prompt="a")
    wide = replace(small, width=2 * small.width)
    clip = replace(small, num_frames=81)
    guided = replace(small, true_cfg_scale=4.0)
    encoded = (("pooled", (1, 768)), ("prompt_embeds", (1, 7, 4)))
    small_s, wide_s, clip_s, guided_s = (rough_estimate_s(one, encoded) for one in (small, wide, clip, guided))
    assert small_s < wide_s < clip_s
    assert guided_s == 2 * small_s
    assert num_text_tokens(encoded) == 7
