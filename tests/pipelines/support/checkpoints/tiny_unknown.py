"""Tiny checkpoints of published architectures that have no file in pipelines/models: random weights."""

from __future__ import annotations

import json
from pathlib import Path

from tests.pipelines.support.checkpoints.parts import (
    ALPHABET,
    HIDDEN,
    NUM_HEADS,
    auto_encoder,
    chat_tokenizer,
    clip,
    flow,
    places,
    qwen3,
    saved,
    shake,
    t5,
    tokenizer,
)
from tests.pipelines.support.checkpoints.tiny_others import PROJECTED
from tests.pipelines.support.checkpoints.tiny_qwen import qwen_auto_encoder


def ltx(path: Path) -> Path:
    from diffusers import AutoencoderKLLTXVideo, LTXPipeline, LTXVideoTransformer3DModel

    transformer = LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=NUM_HEADS,
        attention_head_dim=16,
        cross_attention_dim=64,
        num_layers=2,
        caption_channels=48,
    )
    stages = {
        "block_out_channels": (8, 8, 8, 8),
        "decoder_block_out_channels": (8, 8, 8, 8),
        "layers_per_block": (1, 1, 1, 1, 1),
        "decoder_layers_per_block": (1, 1, 1, 1, 1),
        "spatio_temporal_scaling": (True, True, True, False),
        "decoder_spatio_temporal_scaling": (True, True, True, False),
        "decoder_inject_noise": (False, False, False, False, False),
        "upsample_residual": (False, False, False, False),
        "upsample_factor": (1, 1, 1, 1),
    }
    vae = AutoencoderKLLTXVideo(latent_channels=8, **stages, timestep_conditioning=False, patch_size=4, patch_size_t=1)
    LTXPipeline(
        scheduler=flow(),
        vae=shake(vae),
        text_encoder=t5("T5"),
        tokenizer=chat_tokenizer(),
        transformer=shake(transformer),
    ).save_pretrained(path)
    return path


def sdxl(path: Path, *, in_channels: int = 4) -> Path:
    """Write a small Stable Diffusion XL; one latent value is 4x4 pixels. With 9 channels it is the one for masks."""
    from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel

    unet = UNet2DConditionModel(
        sample_size=32,
        in_channels=in_channels,
        out_channels=4,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 1),
        projection_class_embeddings_input_dim=80,
        cross_attention_dim=32,
    )
    StableDiffusionXLPipeline(
        unet=shake(unet),
        scheduler=EulerDiscreteScheduler(beta_schedule="scaled_linear", timestep_spacing="leading", steps_offset=1),
        vae=auto_encoder(4, 3, scaling_factor=0.36),
        text_encoder=clip(16, 2),
        tokenizer=tokenizer(),
        text_encoder_2=clip(16, 2, PROJECTED),
        tokenizer_2=tokenizer(),
    ).save_pretrained(path)
    return path


def anima(path: Path) -> Path:
    """Write Cosmos' transformer with a text conditioner between it and the text encoder."""
    from diffusers import AnimaTextConditioner, CosmosTransformer3DModel

    conditioner = AnimaTextConditioner(
        source_dim=HIDDEN,
        target_dim=24,
        model_dim=16,
        num_layers=1,
        num_attention_heads=2,
        target_vocab_size=len(ALPHABET),
        min_sequence_length=16,
    )
    transformer = CosmosTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=24,
        num_layers=2,
        mlp_ratio=2.0,
        text_embed_dim=24,
        adaln_lora_dim=8,
        max_size=(4, 32, 32),
        extra_pos_embed_type=None,
        concat_padding_mask=False,  # the published model has one, for which the class needs torchvision
    )
    entries = saved(
        {
            "text_encoder": qwen3(num_layers=1).model,
            "tokenizer": tokenizer(),
            "t5_tokenizer": tokenizer(),
            "text_conditioner": shake(conditioner),
            "transformer": shake(transformer),
            "vae": qwen_auto_encoder(),
            "scheduler": flow(use_dynamic_shifting=False),
        },
        path,
    )
    index = {"_class_name": "AnimaModularPipeline", "_blocks_class_name": "AnimaAutoBlocks", **places(entries, path)}
    (path / "modular_model_index.json").write_text(json.dumps(index))
    return path
