"""Inputs of peers from diffusers' packed sequences of a text, a clip and its sound."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.models.published import PublishedModel
from benchmarks.peers.calls import ROWS, ClipOfText, packed_clip, packed_time
from pipelines.size import Size
from tests.pipelines.support.checkpoints import tiny_cosmos, tiny_minimax

CLIP, PICTURE = Size(width=64, height=48, num_frames=9), Size(width=64, height=48, num_frames=1)


def tiny_model(path: Path, size: Size) -> PublishedModel:
    return PublishedModel.made(str(tiny_cosmos.cosmos_with_sound(path)), torch.device("cpu"), torch.float32, size)


def test_a_packed_sequence_is_the_text_then_the_clip_then_its_sound(tmp_path: Path) -> None:
    own = tiny_model(tmp_path, CLIP).own_calls[0]
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
    own = {**tiny_model(tmp_path, CLIP).own_calls[0], "sound_tokens": None}
    assert ClipOfText.of(own).sound is None


def test_pictures_actions_and_given_frames_are_refused(tmp_path: Path) -> None:
    own = tiny_model(tmp_path / "clip", CLIP).own_calls[0]
    given = {"vision_noisy_frame_indexes": [own["vision_noisy_frame_indexes"][0][1:]]}
    others = (tiny_model(tmp_path / "picture", PICTURE).own_calls[0], {**own, "action_tokens": []}, {**own, **given})
    for other in others:
        with pytest.raises(ValueError, match="of text alone"):
            ClipOfText.of(other)


def test_a_packed_sequence_of_minimax_is_filled_up(tmp_path: Path) -> None:
    path = tiny_minimax.minimax_h3(tmp_path)
    own = PublishedModel.made(str(path), torch.device("cpu"), torch.float32).own_calls[0]
    branch = packed_clip(own)
    packed, used = branch["packed"], own["token_tags"].numel()
    filled = packed["seq_len"] - used
    assert packed["seq_len"] % ROWS == 0
    assert 0 < filled < ROWS
    assert packed["cu_seqlens"].tolist() == [0, used, used + filled]
    assert torch.equal(branch["token_tags"], torch.cat([own["token_tags"], torch.full([filled], -1)]))
    assert torch.equal(packed["img_position_ids"][:used], own["position_ids"])
    rows = torch.cat([packed["text_pos"], packed["audio_pos"], packed["img_pos"]])
    assert torch.equal(rows, torch.arange(used))
    assert packed["latent_grid"].prod() == own["hidden_states"].shape[1]
    assert branch["text_embeddings"].shape[0] == packed["text_pos"].numel()
    assert packed_time(own) == own["timestep"]
    with pytest.raises(ValueError, match="of text alone"):
        packed_clip({**own, "timestep": torch.tensor([0.0, 0.999])})
