"""The benchmark of clips from latents to MP4 runs on small models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.clip_decode import measure
from benchmarks.models import folders
from pipelines.checkpoint import Checkpoint
from pipelines.size import Size
from tests.pipelines.support.checkpoints import tiny, tiny_hunyuan, tiny_ltx


@pytest.mark.parametrize("make", [tiny.wan, tiny_ltx.ltx2_few_layers, tiny_hunyuan.hunyuan_video])
def test_both_ways_are_timed_and_compared(
    make: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = make(tmp_path / "published")
    monkeypatch.setattr(folders, "resolve_configuration", lambda name: published)
    folders.write_vae("a published model", tmp_path / "written", torch.device("cpu"))
    document = measure(Checkpoint(tmp_path / "written"), Size(width=64, height=64, num_frames=5), 1)
    assert document["size"] == "64x64x5"
    for one in document["results"].values():
        assert 0 < one["decode_s"]["median"] < one["mp4_s"]["median"]
        assert one["mp4_s"]["num"] == 1
    assert document["results"]["as written"]["difference"] == 0
    assert document["results"]["prepared"]["difference"] < 1e-2
