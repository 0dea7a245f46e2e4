"""Decoders and gangs remember and share measured times over starts, and use estimates before."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from deployments.model_config import ModelConfig
from deployments.service.interface import Output
from deployments.stages import measured_times, vae_decoder
from deployments.stages.common import StageSpec
from deployments.stages.measured_times import (
    DecodeKey,
    DecodeTimes,
    decode_times_of,
    estimates_s_of,
    num_text_tokens,
    step_times_of,
)
from deployments.stages.stage_config import DecoderConfig, DenoiserConfig
from deployments.stages.vae_decoder import VaeDecoder
from engines.core.estimates import StepEstimates
from engines.core.parcel import Parcel
from engines.gang.jobs.job import Job
from engines.gang.rank import RankInfo
from pipelines.checkpoint import Checkpoint
from tests.deployments.support.fake_service import PICTURES
from tests.deployments.support.live import wait_until
from tests.support.patience import PATIENCE_S

SMALL: DecodeKey = ("png", 128 * 128)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "decode_times" / "m.json"


def spec_of(path: Path) -> StageSpec:
    model = ModelConfig(name="m", path=str(path))
    return StageSpec(model=model, stage=model.decoder)


def test_a_decoder_that_starts_again_knows_what_it_took(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clock says three seconds; no file of another format was ever written."""
    monkeypatch.setenv("TROUPE_DATA_DIR", str(tmp_path))
    checkpoint, output = Checkpoint(pictures), Output(format="png")
    request = checkpoint.defaults.request(seed=3)
    decoder = VaeDecoder(spec_of(pictures))
    assert decoder.expected_s(request, output) is None
    ticks = iter((10.0, 13.0))
    with monkeypatch.context() as patch:
        patch.setattr(vae_decoder, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
        decoder.decode(Parcel.of(checkpoint.first_latents(request)), request, output)
    wait_until(lambda: any((tmp_path / "decode_times").glob("m_*.json")), "the time is stored")
    again = VaeDecoder(spec_of(pictures))
    assert again.expected_s(request, output) == 3.0
    assert again.expected_s(replace(request, width=2 * request.width), output) == 6.0
    assert again.expected_s(request, Output(format="webp")) is None


def test_one_slow_decode_corrects_nothing(file: Path) -> None:
    """The first decode of a process may be slow. It counts only until others are measured."""
    times = DecodeTimes(file)
    assert [times.learn(SMALL, seconds) for seconds in (0.5, 0.1, 0.1)] == [True, False, True]
    times.save()
    again = DecodeTimes(file)
    assert not any(again.learn(SMALL, seconds) for seconds in (0.9, *[0.105] * 8))
    assert again.scaled_s(SMALL) == 0.1
    for _ in range(32):
        again.learn(SMALL, 0.3)
    assert again.scaled_s(SMALL) == 0.3


def test_a_time_holds_for_its_machine_and_decoder_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROUPE_DATA_DIR", str(tmp_path / "data"))
    folder = tmp_path / "folder"
    monkeypatch.setattr(measured_times, "device_name", lambda device: {"cuda": "H200"}.get(device, device))
    plain = ModelConfig(name="m", path="folder")
    measured = decode_times_of(plain, folder, ["cuda"])
    measured.learn(SMALL, 0.1)
    measured.save()
    compiled = plain.model_copy(update={"decoder": DecoderConfig(compile=True)})
    others = [(plain, ["cpu"]), (plain, ["cuda", "cuda"]), (compiled, ["cuda"])]
    others.append((plain.model_copy(update={"path": "another"}), ["cuda"]))
    assert decode_times_of(plain, folder, ["cuda"]).scaled_s(SMALL) == 0.1
    assert [decode_times_of(model, folder, devices).scaled_s(SMALL) for model, devices in others] == [None] * 4


def test_it_is_written_beside_a_decode_and_not_in_its_time(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TROUPE_DATA_DIR", str(tmp_path))
    may_end, has_ended = threading.Event(), threading.Event()

    def save(times: DecodeTimes) -> None:
        may_end.wait(PATIENCE_S)
        has_ended.set()

    monkeypatch.setattr(DecodeTimes, "save", save)
    checkpoint = Checkpoint(pictures)
    request, decoder = checkpoint.defaults.request(seed=3), VaeDecoder(spec_of(pictures))
    decoder.decode(Parcel.of(checkpoint.first_latents(request)), request, Output(format="png"))
    assert not has_ended.is_set()
    may_end.set()
    assert has_ended.wait(PATIENCE_S)


ESTIMATES = StepEstimates(tokens=(16, 1600), by_size={1: ((0.1, 10.0), (0.2, 20.0)), 2: ((0.08, 8.0), (0.1, 10.0))})
"""At most a hundredth of a second a token."""
JOB = Job(job_id="a", request=None, conditioning=None, num_steps=4, shape="shape")


def infos(device_name: str) -> list[RankInfo]:
    return [RankInfo(rank=rank, pid=1, node_id="", device="cuda:0", device_name=device_name) for rank in range(2)]


def model(**denoiser: object) -> ModelConfig:
    return ModelConfig(name="m", path="folder", denoiser=DenoiserConfig(**denoiser))  # type: ignore[arg-type]


def test_a_gang_predicts_what_others_like_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROUPE_DATA_DIR", str(tmp_path / "data"))
    folder = tmp_path / "folder"
    measured = step_times_of(model(), folder, infos("H200"), None)
    measured.hear_step(JOB, 2, 0.07)
    measured.hear_step(JOB, 2, 0.07)
    assert measured.changed()
    measured.save()
    same = step_times_of(model(max_running_jobs=9, policy="arrival", elastic=True), folder, infos("H200"), None)
    assert same.prediction().step_s(JOB, 2) == 0.07
    others = (  # the last, since measured times are stored beside estimates
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


def test_estimates_grow_with_references() -> None:
    """Pictures, frames of a clip and their sides count; latents that are no tokens of a step do not."""
    clip = replace(PICTURES.request(model="m", prompt="a"), num_frames=81)
    prompt = ("prompt_embeds", (1, 7, 4))
    few, many = ((f"refs.{index}", (1, 24, 1, 8, 14)) for index in range(2)), (("refs.0", (1, 24, 1, 16, 28)),)
    inputs = ((), (("refs.0", (1, 24, 1, 8, 14)),), tuple(few), many, (("refs.0", (1, 24, 37, 48, 84)),))
    for estimates in (None, ESTIMATES):
        times_s = [estimates_s_of(clip, (*own, prompt), estimates, "refs")[1] for own in inputs]
        assert times_s == sorted(set(times_s))
        others = (estimates_s_of(clip, (*own, prompt), estimates, name)[1] for own in inputs for name in ("", "ref"))
        assert {*others} == {times_s[0]}


def test_what_the_cost_model_says_counts_where_it_was_asked() -> None:
    """Teams have each size, with 64 tokens of picture and 16 of text."""
    request = replace(PICTURES.request(model="m", prompt="a"), width=128, height=128)
    encoded = (("prompt_embeds", (1, 16, 4)),)
    assert estimates_s_of(request, encoded, ESTIMATES) == pytest.approx({1: 0.5, 2: 0.4})
    guided = replace(request, true_cfg_scale=4.0)
    assert estimates_s_of(guided, encoded, ESTIMATES) == pytest.approx({1: 1.0, 2: 0.5})
