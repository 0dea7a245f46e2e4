"""Shapes of clips are written in one word."""

from __future__ import annotations

import pytest

from benchmarks.application.parts import ANY_CLIP, ClipShape


def test_a_clip_is_what_the_model_makes_unless_it_is_said() -> None:
    assert (str(ANY_CLIP), ANY_CLIP.fields) == ("default", {})
    assert ClipShape.of("832x480x81").fields == {"size": "832x480", "num_frames": 81}
    assert ClipShape.of("832x480x81@8").fields["num_inference_steps"] == 8


@pytest.mark.parametrize("told", ["832x480", "832x480x0", "axbxc", "832x480x81@", "832x480x81@0"])
def test_others_are_refused(told: str) -> None:
    with pytest.raises(ValueError, match="write WIDTHxHEIGHTxFRAMES"):
        ClipShape.of(told)
