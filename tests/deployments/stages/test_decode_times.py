"""How long a decoder says that it takes: what it measured, before its last start as well, and nothing else."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from deployments.config import ModelConfig
from deployments.stages import decode_times, vae_decoder
from deployments.stages.common import StageSpec
from deployments.stages.config import DecoderConfig
from deployments.stages.decode_times import DecodedLike, DecodeTimes, decode_times_of
from deployments.stages.vae_decoder import VaeDecoder
from deployments.studio.interface import Output
from engines.core.transport.parcel import Parcel
from pipelines.checkpoint import Checkpoint
from tests.deployments.support.live import wait_until
from tests.support.patience import PATIENCE_S

SMALL: DecodedLike = ("png", 128 * 128)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "decode_times" / "m.json"


def spec_of(path: Path) -> StageSpec:
    model = ModelConfig(name="m", path=str(path))
    return StageSpec(model=model, stage=model.decoder)


def test_a_decoder_that_starts_again_knows_what_it_took(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its clock three seconds; a file of another format was never written."""
    monkeypatch.setenv("TROUPE_DATA_DIR", str(tmp_path))
    checkpoint, output = Checkpoint(pictures), Output(format="png")
    request = checkpoint.defaults.request(seed=3)
    decoder = VaeDecoder(spec_of(pictures))
    assert decoder.expected_s(request, output) is None
    ticks = iter((10.0, 13.0))
    with monkeypatch.context() as patch:
        patch.setattr(vae_decoder, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
        decoder.decode(Parcel.of(checkpoint.first_latents(request)), request, output)
    wait_until(lambda: any((tmp_path / "decode_times").glob("m_*.json")), "what was measured is kept")
    again = VaeDecoder(spec_of(pictures))
    assert again.expected_s(request, output) == 3.0
    assert again.expected_s(replace(request, width=2 * request.width), output) == 6.0
    assert again.expected_s(request, Output(format="webp")) is None


def test_one_slow_decode_corrects_nothing(file: Path) -> None:
    """As the first of a process may be. Where nothing is known it is what there is, until others tell."""
    times = DecodeTimes(file)
    assert [times.note(SMALL, seconds) for seconds in (0.5, 0.1, 0.1)] == [True, False, True]
    times.save()
    again = DecodeTimes(file)
    assert not any(again.note(SMALL, seconds) for seconds in (0.9, *[0.105] * 8))
    assert again.predicted_s(SMALL) == 0.1
    for _ in range(32):
        again.note(SMALL, 0.3)
    assert again.predicted_s(SMALL) == 0.3


def test_a_time_holds_for_its_machine_and_decoder_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROUPE_DATA_DIR", str(tmp_path / "data"))
    folder = tmp_path / "folder"
    monkeypatch.setattr(decode_times, "device_name", lambda device: {"cuda": "H200"}.get(device, device))
    plain = ModelConfig(name="m", path="folder")
    measured = decode_times_of(plain, folder, ["cuda"])
    measured.note(SMALL, 0.1)
    measured.save()
    compiled = plain.model_copy(update={"decoder": DecoderConfig(compile=True)})
    others = [(plain, ["cpu"]), (plain, ["cuda", "cuda"]), (compiled, ["cuda"])]
    others.append((plain.model_copy(update={"path": "another"}), ["cuda"]))
    assert decode_times_of(plain, folder, ["cuda"]).predicted_s(SMALL) == 0.1
    assert [decode_times_of(model, folder, devices).predicted_s(SMALL) for model, devices in others] == [None] * 4


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
