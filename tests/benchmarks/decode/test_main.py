"""Decoding is measured on the requested numbers of devices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.decode import case as case_module
from benchmarks.decode.__main__ import decodings
from benchmarks.decode.case import Case, alike_db
from benchmarks.decode.clip import moving_frames, phases
from benchmarks.models import folders
from pipelines.loading import resolve_path
from pipelines.size import Size
from pipelines.vae import chunks, multi_gpu
from tests.pipelines.support.checkpoints import tiny


def test_times_and_likeness_of_one_device_and_of_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published = tiny.flux(tmp_path / "published")
    for file in published.glob("**/*.safetensors"):
        file.unlink()
    monkeypatch.setattr(folders, "resolve_configuration", lambda name: published)
    monkeypatch.setattr(multi_gpu, "MIN_BAND_ROWS", 4)
    folders.write_vae("tiny", tmp_path / "written", torch.device("cpu"))
    assert [file.parent.name for file in (tmp_path / "written").glob("**/*.safetensors")] == ["vae"]
    size = Size(width=16, height=64)
    case = Case(folder=tmp_path / "written", size=size, kind="cpu", memory_bytes=None, repeats=2)
    ceiling, one, two = decodings(case, (1, 2))
    assert ceiling["tflop"] > 0
    for result, count in ((one, 1), (two, 2)):
        assert result["num_devices"] == count
        for name in ("pixels_ms", "frames_ms", "file_ms"):
            assert 0 < result[name]["lowest"] <= result[name]["median"]
            assert result[name]["num"] == 2
    assert one["alike_db"] == 120
    assert 45 < two["alike_db"] <= 120


def test_phases_of_a_clip_by_content_and_by_number_of_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "MIN_BAND_PIXELS", 8)
    monkeypatch.setattr(case_module, "WARM_UP", 0)
    size = Size(width=32, height=32, num_frames=5)
    case = Case(folder=tiny.wan(tmp_path), size=size, kind="cpu", memory_bytes=None, repeats=1)
    ceiling, moving, decoded, one, two = phases(case, (1, 2))
    assert ceiling["tflop"] > 0
    assert [moving["encoding"], decoded["encoding"]] == ["moving", "decoded"]
    for result in (moving, decoded):
        assert result["num_groups"] == 2
        assert result["num_bytes"] > 1000
    assert [one["num_devices"], two["num_devices"]] == [1, 2]
    times = {name for name in one if name.endswith("_ms")}
    assert times == {"issue_ms", "vae_ms", "to_frames_ms", "copy_ms", "chunks_ms", "file_ms", "moving_file_ms"}
    for name in times:
        assert one[name]["num"] == two[name]["num"] == 1
    assert 45 < two["alike_db"] <= 120
    pictures = replace(case, folder=resolve_path("flux-shapes"), size=Size(width=64, height=64))
    with pytest.raises(ValueError, match="flux-shapes makes pictures: choose a model of clips"):
        next(phases(pictures, (1,)))


def test_moving_frames_drift() -> None:
    frames = moving_frames(3, 32, 48).astype(int)
    assert np.abs(frames[1, :, :-4] - frames[0, :, 4:]).mean() < 5 < np.abs(frames[1] - frames[0]).mean()


def test_likeness_is_that_of_eight_bits() -> None:
    frames = np.full((1, 2, 2, 3), 100, np.uint8)
    assert alike_db(frames, frames + 1) == pytest.approx(48.1, abs=0.05)
