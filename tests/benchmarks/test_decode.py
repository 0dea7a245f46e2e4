"""Decoding is measured on the requested numbers of devices."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.decode import Case, alike_db, decodings
from benchmarks.models import folders
from pipelines.size import Size
from pipelines.vae import multi_gpu
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


def test_likeness_is_that_of_eight_bits() -> None:
    frames = np.full((1, 2, 2, 3), 100, np.uint8)
    assert alike_db(frames, frames + 1) == pytest.approx(48.1, abs=0.05)
