"""A small MiniMax-H3 with random weights: a folder with a modular index, as published."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from tests.pipelines.support.checkpoints.parts import HIDDEN, saved, shake
from tests.pipelines.support.checkpoints.tiny_qwen import Qwen3Processor, qwen3_vl, vision_tokenizer

NUM_LAYERS = 51
"""Layers of the text encoder; the state after the fiftieth is used."""
LOAD_PROCESSOR = "transformers.Qwen3VLProcessor.from_pretrained"


class MiniMaxProcessor(Qwen3Processor):
    """Stands for ``Qwen3VLProcessor``, which cannot be made without torchvision."""

    @property
    def image_processor(self) -> Any:
        return self.images

    @property
    def video_processor(self) -> Any:
        return VideoProcessor(self.images)

    def create_mm_token_type_ids(self, ids: list[list[int]]) -> list[list[int]]:
        kinds = {self.tokenizer.convert_tokens_to_ids(f"<|{kind}_pad|>"): n for n, kind in ((1, "image"), (2, "video"))}
        return [[kinds.get(one, 0) for one in row] for row in ids]


class VideoProcessor:
    """Stands for ``Qwen3VLVideoProcessor``, which needs torchvision: makes patches of two frames each."""

    temporal_patch_size = 2

    def __init__(self, images: Any) -> None:
        self._images = images

    def __call__(self, *, videos: list[Any], do_sample_frames: bool, return_tensors: str) -> dict[str, Any]:
        assert not do_sample_frames
        values, grids = [], []
        for frames_FHWC in videos:
            pairs = [frames_FHWC[place : place + 2] for place in range(0, len(frames_FHWC), 2)]
            seen = [
                [self._images(Image.fromarray(frame), return_tensors=return_tensors) for frame in pair]
                for pair in pairs
            ]
            for pair in seen:
                values.append(self._together(pair[0]["pixel_values"], pair[-1]["pixel_values"]))
            (grid,) = seen[0][0]["image_grid_thw"]
            grids.append(torch.tensor([len(pairs), int(grid[1]), int(grid[2])]))
        return {"pixel_values_videos": torch.cat(values), "video_grid_thw": torch.stack(grids)}

    def _together(self, first: Any, second: Any) -> Any:
        """Join two pictures, each seen as two equal frames: the first of one, and the second of the other."""
        shape = (len(first), 3, self.temporal_patch_size, -1)
        halves = first.reshape(shape)[:, :, :1], second.reshape(shape)[:, :, 1:]
        return torch.cat(halves, dim=2).reshape(first.shape)


def minimax_h3(path: Path) -> Path:
    """Write a model with a transformer for references that has no weights: no test may load it."""
    classes = _write(path, {"transformer": shake(_transformer())})
    return _with_index(path, {**classes, "transformer_ref": classes["transformer"]})


def minimax_h3_references(path: Path) -> Path:
    """Write a model with only the transformer for references, which scales pictures and clips to small sizes."""
    classes = _write(path, {"transformer_ref": shake(_transformer(), seed=4)})
    sizes = {"canvas_short_edge": 64, "canvas_max_pixels": 64 * 128, "reference_image_short_edge": 96}
    return _with_index(path, classes, sizes)


def _write(path: Path, transformers: dict[str, Any]) -> dict[str, Any]:
    """Save the parts, and return their libraries and classes by name."""
    import diffusers

    parts = {
        **transformers,
        "vae": shake(_vae()),
        "audio_vae": _audio_vae(),
        "scheduler": diffusers.MiniMaxH3Scheduler(shift=12.0),
        "audio_scheduler": diffusers.MiniMaxH3Scheduler(shift=3.0),
        "text_encoder": qwen3_vl(NUM_LAYERS),
        "tokenizer": vision_tokenizer(),
    }
    return {**saved(parts, path), "processor": ["transformers", "Qwen3VLProcessor"]}


def _with_index(path: Path, classes: dict[str, Any], settings: Mapping[str, int] | None = None) -> Path:
    entries = {
        name: [*kind, {"pretrained_model_name_or_path": str(path), "subfolder": name, "type_hint": kind}]
        for name, kind in classes.items()
    }
    names = {"_class_name": "MiniMaxH3ModularPipeline", "_blocks_class_name": "MiniMaxH3Blocks"}
    index = {**names, **(settings or {}), **entries}
    (path / "modular_model_index.json").write_text(json.dumps(index))
    return path


def _transformer() -> Any:
    from diffusers import MiniMaxH3Transformer3DModel

    return MiniMaxH3Transformer3DModel(
        num_attention_heads=4,
        attention_head_dim=16,
        hidden_size=48,
        num_layers=2,
        num_refiner_layers=1,
        ffn_dim=64,
        in_channels=4,
        audio_in_channels=4,
        text_dim=HIDDEN,
        freq_dim=32,
        time_embed_hidden_dim=48,
        time_embed_dim=24,
        rope_freq_dim=2,
    )


def _vae() -> Any:
    from diffusers import AutoencoderKLMiniMaxH3

    return AutoencoderKLMiniMaxH3(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        spatial_downsample_factors=(2, 2, 2, 2),
        temporal_downsample_factors=(1, 2, 2, 1),
        norm_num_groups=4,
        decoder_num_layers=1,
        decoder_num_attention_heads=2,
        decoder_attention_head_dim=8,
        decoder_num_register_tokens=2,
        decoder_ffn_mult=2,
        latents_mean=(0.1, -0.2, 0.3, 0.0),
        latents_std=(1.5, 2.0, 1.1, 0.7),
    )


def _audio_vae() -> Any:
    from diffusers import AutoencoderKLMiniMaxH3Audio

    torch.manual_seed(0)
    return AutoencoderKLMiniMaxH3Audio(
        encoder_dim=4,
        encoder_rates=(2, 4),
        latent_dim=16,
        latent_channels=4,
        num_attention_heads=2,
        decoder_dim=16,
        decoder_rates=(4, 2),
        decoder_kernel_sizes=(8, 4),
        resblock_kernel_sizes=(3,),
        resblock_dilation_sizes=((1, 3, 5),),
        sampling_rate=320,
        latents_mean=[0.1, 0.0, -0.1, 0.2],
        latents_std=[1.0, 1.2, 0.9, 1.1],
    ).eval()
