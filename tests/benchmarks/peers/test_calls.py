"""Inputs of peers from diffusers' packed sequence of a text, a clip and its sound."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.models.published import PublishedModel
from benchmarks.peers.calls import ClipOfText
from pipelines.size import Size
from tests.pipelines.support.checkpoints import tiny_cosmos

CLIP, PICTURE = Size(width=64, height=48, num_frames=9), Size(width=64, height=48, num_frames=1)


def made(path: Path, size: Size) -> PublishedModel:
    return PublishedModel.made(str(tiny_cosmos.cosmos_with_sound(path)), torch.device("cpu"), torch.float32, size)


def test_a_packed_sequence_is_the_text_then_the_clip_then_its_sound(tmp_path: Path) -> None:
    own = made(tmp_path, CLIP).own_calls[0]
    clip, length = ClipOfText.of(own), own["und_len"]
    assert torch.equal(clip.text_ids[0], own["input_ids"])
    assert clip.text_positions.shape == (3, 1, length)
    assert clip.positions.shape == (3, 1, own["sequence_length"] - length)
    assert torch.equal(torch.cat([clip.text_positions, clip.positions], dim=2)[:, 0], own["position_ids"])
    assert own["text_indexes"].tolist() == list(range(length))
    assert own["vision_sequence_indexes"][0] == length
    assert own["sound_sequence_indexes"][0] == length + own["vision_sequence_indexes"].numel()
    assert clip.latents is own["vision_tokens"][0]
    assert clip.sound is not None
    assert torch.equal(clip.sound[0], own["sound_tokens"][0])
    assert (clip.timestep == own["vision_timesteps"]).all()


def test_a_clip_may_be_silent(tmp_path: Path) -> None:
    own = {**made(tmp_path, CLIP).own_calls[0], "sound_tokens": None}
    assert ClipOfText.of(own).sound is None


def test_pictures_actions_and_given_frames_are_refused(tmp_path: Path) -> None:
    own = made(tmp_path / "clip", CLIP).own_calls[0]
    given = {"vision_noisy_frame_indexes": [own["vision_noisy_frame_indexes"][0][1:]]}
    others = (made(tmp_path / "picture", PICTURE).own_calls[0], {**own, "action_tokens": []}, {**own, **given})
    for other in others:
        with pytest.raises(ValueError, match="of text alone"):
            ClipOfText.of(other)
