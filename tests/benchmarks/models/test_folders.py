"""A folder that the benchmark writes by a configuration alone is a whole model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.models import folders
from pipelines.checkpoint import Checkpoint
from pipelines.run import load_pipeline
from pipelines.size import Size
from tests.pipelines.support import tiny_cosmos


def test_what_is_written_makes_clips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published = tiny_cosmos.cosmos_with_sound(tmp_path / "published")
    for file in published.glob("**/*.safetensors"):
        file.unlink()
    monkeypatch.setattr(folders, "resolve_configuration", lambda name: published)
    folders.write_folder("Cosmos3-Nano", tmp_path / "written", torch.device("cpu"))
    checkpoint = Checkpoint(tmp_path / "written")
    request = checkpoint.defaults.request(Size(width=64, height=32, num_frames=5), num_inference_steps=1)
    assert load_pipeline(checkpoint).run(request).shape == (5, 32, 64, 3)


def test_a_model_whose_encoders_are_not_known_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no text encoders are known for LTX-2; known: Cosmos3-Nano, FLUX"):
        folders.write_folder("LTX-2", tmp_path / "written", torch.device("cpu"))
