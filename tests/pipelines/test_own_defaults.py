"""A folder's own settings override its family's."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.models.spec import CLIP, PICTURE
from pipelines.own_defaults import with_own_defaults


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ('{"max_pixels": "65536"}', 'troupe.json: max_pixels is "65536"; it must be a value such as 4194304'),
        ('{"num_frames": 1.5}', "num_frames is 1.5; it must be a value such as 1"),
        ('{"takes_mask": 1}', "takes_mask is 1; it must be a value such as false"),
        ('{"max_steps": true}', "max_steps is true; it must be a value such as 100"),
        ('{"guidance_scale": null}', "guidance_scale is null; it must be a value such as 0.0"),
        ('{"max_pixels": 65536,}', "troupe.json is no JSON"),
        ('{"guidance_scale": NaN}', "troupe.json is no JSON: NaN is no JSON number"),
        ("[]", "troupe.json is no JSON object"),
        ('{"size_multiple": 0}', "troupe.json: size_multiple is 0; it must be at least 1"),
        ('{"width": 1000}', "troupe.json: its values contradict each other: size is 1000x1024: width and height must"),
        ('{"chunk_overlap": 5}', "troupe.json has unknown keys chunk_overlap; known: width"),
        ('{"max_steps": 10}', "num_inference_steps is 50; it must be from 1 to 10"),
    ],
)
def test_what_a_folder_says_can_be(written: str, told: str, tmp_path: Path) -> None:
    """Otherwise the first request would fail."""
    (tmp_path / "troupe.json").write_text(written)
    with pytest.raises(ValueError, match=told):
        with_own_defaults(tmp_path, PICTURE)
    (tmp_path / "troupe.json").write_text('{"guidance_scale": 3}')
    assert with_own_defaults(tmp_path, PICTURE).guidance_scale == 3.0


def test_a_clip_has_a_rate(tmp_path: Path) -> None:
    """Without one its frames cannot become a file. A picture has none."""
    (tmp_path / "troupe.json").write_text('{"fps": 0}')
    with pytest.raises(ValueError, match=r"troupe.json: fps is 0; it must be at least 1"):
        with_own_defaults(tmp_path, CLIP)
    assert with_own_defaults(tmp_path, PICTURE).fps == 0


def test_pictures_beside_clips_can_be(tmp_path: Path) -> None:
    (tmp_path / "troupe.json").write_text('{"picture_width": 640, "picture_height": 480}')
    assert with_own_defaults(tmp_path, CLIP).of("image").request().width == 640
    (tmp_path / "troupe.json").write_text('{"picture_width": 640}')
    with pytest.raises(ValueError, match="contradict each other: size is 640x0"):
        with_own_defaults(tmp_path, CLIP)
