"""Tiny checkpoints of HunyuanVideo 1.5, random weights, in diffusers' layout."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from tests.pipelines.support.checkpoints.parts import HIDDEN, chat_tokenizer, shake
from tests.pipelines.support.checkpoints.tiny_qwen import qwen_vl


def hunyuan_video(path: Path, *, task: str = "t2v") -> Path:
    """Write a small HunyuanVideo 1.5; one latent value is 16x16 pixels (the blocks allow no other) and 2 frames."""
    import diffusers
    from diffusers.guiders import ClassifierFreeGuidance
    from transformers import ByT5Tokenizer

    vae = diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=4,
        block_out_channels=(16, 16, 16, 16, 16),
        layers_per_block=1,
        spatial_compression_ratio=16,
        temporal_compression_ratio=2,
        downsample_match_channel=False,
        upsample_match_channel=False,
    )
    parts = {
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
        "vae": shake(vae),
        "text_encoder": qwen_vl().model.language_model,
        "tokenizer": chat_tokenizer(),
        "text_encoder_2": byt5(),
        "tokenizer_2": ByT5Tokenizer(),
        "transformer": shake(_transformer(task)),
        "guider": ClassifierFreeGuidance(),
    }
    if task == "t2v":
        diffusers.HunyuanVideo15Pipeline(**parts).save_pretrained(path)
    else:
        diffusers.HunyuanVideo15ImageToVideoPipeline(**parts, **_siglip()).save_pretrained(path)
    return path


hunyuan_video_picture = partial(hunyuan_video, task="i2v")


def byt5() -> Any:
    from transformers import T5Config, T5EncoderModel

    sizes = {"d_model": 48, "d_kv": 12, "d_ff": 96, "num_layers": 1, "num_heads": 4}
    return shake(T5EncoderModel(T5Config(vocab_size=384, **sizes, feed_forward_proj="gated-gelu")))


def _siglip() -> dict[str, Any]:
    """Return an encoder with the published number of picture tokens: 27 squared."""
    from transformers import SiglipImageProcessor, SiglipVisionConfig, SiglipVisionModel

    sizes = {"hidden_size": 12, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = SiglipVisionConfig(**sizes, image_size=54, patch_size=2)
    processor = SiglipImageProcessor(size={"height": 54, "width": 54})
    return {"image_encoder": shake(SiglipVisionModel(config)), "feature_extractor": processor}


def _transformer(task: str) -> Any:
    import diffusers

    return diffusers.HunyuanVideo15Transformer3DModel(
        in_channels=9,
        out_channels=4,
        num_attention_heads=4,
        attention_head_dim=8,
        num_layers=2,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        text_embed_dim=HIDDEN,
        text_embed_2_dim=48,
        image_embed_dim=12,
        rope_axes_dim=(2, 2, 4),
        task_type=task,
    )
