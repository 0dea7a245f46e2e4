"""Tiny checkpoints of LTX-Video and LTX-2, random weights, in diffusers' layout."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from tests.pipelines.support.checkpoints.parts import flow, qwen3, shake, t5, tokenizer


def ltx(path: Path) -> Path:
    """Write a small LTX-Video; one latent value is 32x32 pixels (the blocks allow no other) and 4 frames."""
    import diffusers

    transformer = diffusers.LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=4,
        attention_head_dim=8,
        cross_attention_dim=32,
        num_layers=4,
        caption_channels=48,
    )
    vae = diffusers.AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        decoder_inject_noise=(False,) * 5,
        upsample_residual=(False,) * 4,
        upsample_factor=(1,) * 4,
        patch_size=8,
        patch_size_t=1,
        encoder_causal=True,
        decoder_causal=False,
    )
    diffusers.LTXPipeline(
        scheduler=flow(),
        vae=shake(vae),
        text_encoder=t5("T5"),
        tokenizer=tokenizer(128),
        transformer=shake(transformer),
    ).save_pretrained(path)
    return path


def ltx2(path: Path, *, num_layers: int = 29, **changes: Any) -> Path:
    """Write a small LTX-2.3; one latent value is 32x32 pixels (the blocks allow no other) and 2 frames.

    29 layers include the one that guidance by a perturbed layer skips. ``changes`` are the transformer's.
    """
    import diffusers

    audio_vae = _ltx2_audio_vae()
    diffusers.LTX2Pipeline(
        scheduler=flow(),
        vae=shake(_ltx2_vae()),
        audio_vae=shake(audio_vae),
        text_encoder=qwen3(num_layers=2).model,
        tokenizer=tokenizer(40),
        connectors=shake(_ltx2_connectors()),
        transformer=shake(_ltx2_transformer(num_layers, **changes)),
        vocoder=shake(_ltx2_vocoder(audio_vae)),
    ).save_pretrained(path)
    return path


ltx2_few_layers = partial(ltx2, num_layers=2)
ltx2_gated = partial(
    ltx2, num_layers=2, gated_attn=True, audio_gated_attn=True, rope_type="interleaved", cross_attn_mod=True
)
"""A model with a gate a head, and interleaved rotation of a token's features (the class's default)."""


def ltx2_two_stages(path: Path) -> Path:
    """Write a model with a latent upsampler, auto-encoders with unusual statistics, and the published scheduler."""
    import torch
    from diffusers import AutoModel
    from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel

    ltx2_few_layers(path)
    flow(shift=1.0, shift_terminal=0.1).save_pretrained(path / "scheduler")
    upsampler: Any = LTX2LatentUpsamplerModel(in_channels=4, mid_channels=32, num_blocks_per_stage=1)
    shake(upsampler)
    upsampler.save_pretrained(path / "latent_upsampler")
    for part in ("vae", "audio_vae"):
        model: Any = AutoModel.from_pretrained(str(path / part))
        model.latents_mean.copy_(torch.linspace(-0.5, 0.4, len(model.latents_mean)))
        model.latents_std.copy_(torch.linspace(0.7, 1.6, len(model.latents_std)))
        model.save_pretrained(path / part)
    return path


def ltx25(path: Path) -> Path:
    """Write a small LTX-2.5, with both decoders and the parts that no request needs."""
    from diffusers import LTX2VideoDiffusionDecoderModel
    from diffusers.pipelines.ltx2.duration_head import LTX2DurationHead

    ltx2(path, num_layers=2, gated_attn=True, audio_gated_attn=True, cross_attn_mod=True, ff_bias=False)
    head: Any = LTX2DurationHead(video_cross_attention_dim=32, audio_cross_attention_dim=16, pooler_hidden_dim=16)
    decoder: Any = LTX2VideoDiffusionDecoderModel(
        latent_channels=4, decoder_head_dim=8, decoder_stage_channels=(64, 32, 16, 16, 8), decoder_stage_depths=(1,) * 5
    )
    for name, part in (("duration_head", head), ("diffusion_decoder", decoder)):
        shake(part)
        part.save_pretrained(path / name)
    file = path / "model_index.json"
    more = {
        "duration_head": ["ltx2", "LTX2DurationHead"],
        "diffusion_decoder": ["diffusers", "LTX2VideoDiffusionDecoderModel"],
    }
    file.write_text(json.dumps(json.loads(file.read_text()) | more))
    return path


def ltx25_modular(path: Path) -> Path:
    """Write the same with the index of modular blocks."""
    ltx25(path)
    file = path / "model_index.json"
    parts = {
        name: entry for name, entry in json.loads(file.read_text()).items() if isinstance(entry, list) and entry[1]
    }
    places = {
        name: [*entry, {"pretrained_model_name_or_path": str(path), "subfolder": name, "type_hint": entry}]
        for name, entry in parts.items()
    }
    index = {"_class_name": "LTX25ModularPipeline", "_blocks_class_name": "LTX25AutoBlocks", **places}
    (path / "modular_model_index.json").write_text(json.dumps(index))
    file.unlink()
    return path


def _ltx2_vae() -> Any:
    from diffusers import AutoencoderKLLTX2Video

    return AutoencoderKLLTX2Video(
        latent_channels=4,
        block_out_channels=(8,),
        decoder_block_out_channels=(8,),
        layers_per_block=(1,),
        decoder_layers_per_block=(1, 1),
        spatio_temporal_scaling=(True,),
        decoder_spatio_temporal_scaling=(True,),
        decoder_inject_noise=(False, False),
        downsample_type=("spatiotemporal",),
        upsample_residual=(False,),
        upsample_factor=(1,),
        patch_size=16,
        patch_size_t=1,
        encoder_causal=True,
        decoder_causal=False,
    )


def _ltx2_audio_vae() -> Any:
    from diffusers import AutoencoderKLLTX2Audio

    return AutoencoderKLLTX2Audio(
        base_channels=4,
        output_channels=2,
        ch_mult=(1,),
        num_res_blocks=1,
        attn_resolutions=None,
        in_channels=2,
        resolution=32,
        latent_channels=2,
        norm_type="pixel",
        causality_axis="height",
        mid_block_add_attention=False,
        sample_rate=16000,
        mel_hop_length=160,
        mel_bins=8,
    )


def _ltx2_connectors() -> Any:
    from diffusers.pipelines.ltx2 import LTX2TextConnectors

    heads = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 1, "num_learnable_registers": None}
    return LTX2TextConnectors(
        caption_channels=32,
        text_proj_in_factor=3,
        **{f"{stream}_connector_{name}": value for stream in ("video", "audio") for name, value in heads.items()},
        connector_rope_base_seq_len=32,
        rope_theta=10000.0,
        rope_double_precision=False,
        causal_temporal_positioning=False,
        rope_type="split",
    )


def _ltx2_transformer(num_layers: int, **changes: Any) -> Any:
    import diffusers

    return diffusers.LTX2VideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=4,
        attention_head_dim=8,
        cross_attention_dim=32,
        vae_scale_factors=(2, 32, 32),
        audio_in_channels=4,
        audio_out_channels=4,
        audio_num_attention_heads=4,
        audio_attention_head_dim=4,
        audio_cross_attention_dim=16,
        num_layers=num_layers,
        caption_channels=32,
        rope_double_precision=False,
        perturbed_attn=True,
        **{"rope_type": "split", **changes},
    )


def _ltx2_vocoder(audio_vae: Any) -> Any:
    from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder

    return LTX2Vocoder(
        in_channels=audio_vae.config.output_channels * audio_vae.config.mel_bins,
        hidden_channels=32,
        out_channels=2,
        upsample_kernel_sizes=[4, 4],
        upsample_factors=[2, 2],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1, 3, 5]],
        output_sampling_rate=16000,
    )
