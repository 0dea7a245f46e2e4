"""The benchmark of clips from latents to MP4, on a small checkpoint."""

from __future__ import annotations

from pathlib import Path

from benchmarks.clip_decode import measure
from pipelines.checkpoint import Checkpoint
from pipelines.size import Size
from tests.pipelines.support.checkpoints import tiny


def test_both_ways_are_timed_and_compared(tmp_path: Path) -> None:
    document = measure(Checkpoint(tiny.wan(tmp_path)), Size(width=64, height=48, num_frames=13), 2)
    assert document["size"] == "64x48x13"
    for one in document["results"].values():
        assert 0 < one["decode_s"]["median"] < one["mp4_s"]["median"]
        assert one["mp4_s"]["num"] == 2
    assert document["results"]["as written"]["difference"] == 0
    assert document["results"]["prepared"]["difference"] < 1e-2
