"""Which gangs share what was measured, and what is estimated before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from deployments.config import ModelConfig
from deployments.stages.config import DenoiserConfig
from deployments.stages.gang.step_times import estimates_s_of, num_text_tokens, step_times_of
from engines.core.estimates import StepEstimates
from engines.gang.jobs.job import Job
from engines.gang.ranks.rank import RankInfo
from tests.deployments.support.fake_studio import PICTURES

ESTIMATES = StepEstimates(tokens=(16, 1600), by_size={1: ((0.1, 10.0), (0.2, 20.0)), 2: ((0.08, 8.0), (0.1, 10.0))})
"""A hundredth of a second a token and less."""
JOB = Job(job_id="a", request=None, conditioning=None, num_steps=4, shape="shape")


def infos(device_name: str) -> list[RankInfo]:
    return [RankInfo(rank=rank, pid=1, node_id="", device="cuda:0", device_name=device_name) for rank in range(2)]


def model(**denoiser: object) -> ModelConfig:
    return ModelConfig(name="m", path="folder", denoiser=DenoiserConfig(**denoiser))  # type: ignore[arg-type]


def test_a_gang_predicts_what_others_like_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROUPE_DATA_DIR", str(tmp_path / "data"))
    folder = tmp_path / "folder"
    measured = step_times_of(model(), folder, infos("H200"), None)
    measured.note(JOB, 2, 0.07)
    measured.note(JOB, 2, 0.07)
    assert measured.changed()
    measured.save()
    same = step_times_of(model(max_running_jobs=9, policy="arrival", elastic=True), folder, infos("H200"), None)
    assert same.prediction().step_s(JOB, 2) == 0.07
    others = (  # the last, since what was measured is kept beside what was estimated
        step_times_of(model(), folder, infos("H100"), None),
        step_times_of(model(strategy="ring"), folder, infos("H200"), None),
        step_times_of(model(), folder, infos("H200"), ESTIMATES),
    )
    assert [one.prediction().measured for one in others] == [{}, {}, {}]


def test_estimates_grow_with_what_a_step_works_on() -> None:
    small = PICTURES.request(model="m", prompt="a")
    wide = replace(small, width=2 * small.width)
    clip = replace(small, num_frames=81)
    guided = replace(small, true_cfg_scale=4.0)
    encoded = (("pooled", (1, 768)), ("prompt_embeds", (1, 7, 4)))
    small_s, wide_s, clip_s, guided_s = (estimates_s_of(one, encoded, None)[1] for one in (small, wide, clip, guided))
    assert small_s < wide_s < clip_s
    assert guided_s == 2 * small_s
    assert num_text_tokens(encoded) == 7


def test_what_the_cost_model_says_counts_where_it_was_asked() -> None:
    """On teams of each size; of 64 tokens of picture and 16 of text."""
    request = replace(PICTURES.request(model="m", prompt="a"), width=128, height=128)
    encoded = (("prompt_embeds", (1, 16, 4)),)
    assert estimates_s_of(request, encoded, ESTIMATES) == pytest.approx({1: 0.5, 2: 0.4})
    guided = replace(request, true_cfg_scale=4.0)
    assert estimates_s_of(guided, encoded, ESTIMATES) == pytest.approx({1: 1.0, 2: 0.5})
