"""SGLang's transformers of the models that published.py times, called as its pipelines call them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.models.published import PublishedModel
from benchmarks.peers import sglang
from benchmarks.peers.calls import Call, ClipOfText, Prepare, known
from benchmarks.peers.sglang_calls import call_in_parts, call_of, rotary_in_parts
from benchmarks.peers.step import SGLANG_COMPILED
from engines.core.spec import ParallelSpec

GROUPS = "sglang.multimodal_gen.runtime.distributed.parallel_state"
"""Module of its groups of ranks."""


def transformer_of(model: PublishedModel, maker: str, layout: ParallelSpec) -> tuple[Any, Prepare]:
    """Return the transformer, eager as it ships or with compiled blocks, and what prepares a call."""
    module, name = model.module, type(model.module).__name__
    place, configs, prepare = known(MODELS, name)
    sglang.begin(layout)
    transformer_class = getattr(importlib.import_module(f"sglang.multimodal_gen.runtime.models.dits.{place}"), name)
    config_module, config_class = configs.split(":")
    config = getattr(
        importlib.import_module(f"sglang.multimodal_gen.configs.models.dits.{config_module}"), config_class
    )()
    options = {NAMES.get(key, key): value for key, value in module.config.items() if not key.startswith("_")}
    config.update_model_arch(options)
    return sglang.loaded(transformer_class, config, module, SGLANG_COMPILED[maker]), prepare


def _flux2(transformer: Any, own: Mapping[str, Any]) -> Call:
    return call_in_parts(
        transformer,
        own["hidden_states"],
        encoder_hidden_states=own["encoder_hidden_states"],
        guidance=own["guidance"],
        timestep=own["timestep"] * sglang.TRAINED_STEPS,
        freqs_cis=rotary_in_parts(transformer, own["txt_ids"], own["img_ids"]),
    )


def _qwen(transformer: Any, own: Mapping[str, Any]) -> Call:
    from sglang.multimodal_gen.configs.pipeline_configs.base import shard_rotary_emb_for_sp
    from sglang.multimodal_gen.configs.pipeline_configs.qwen_image import QwenImagePipelineConfig

    hidden, text = own["hidden_states"], own["encoder_hidden_states"]
    lengths = [text.shape[1]]
    caches, freqs = QwenImagePipelineConfig.get_freqs_cis(
        own["img_shapes"], lengths, transformer.rotary_emb, hidden.device, hidden.dtype
    )
    (cache, text_cache), (complex_, text_complex) = caches, freqs
    return call_in_parts(
        transformer,
        hidden,
        encoder_hidden_states=text,
        timestep=own["timestep"] * sglang.TRAINED_STEPS,
        img_shapes=own["img_shapes"],
        txt_seq_lens=lengths,
        freqs_cis=(shard_rotary_emb_for_sp(cache), text_cache),
        freqs_complex=(shard_rotary_emb_for_sp(complex_), text_complex),
    )


def _z_image(transformer: Any, own: Mapping[str, Any]) -> Call:
    from sglang.multimodal_gen.configs.pipeline_configs.zimage import ZImagePipelineConfig

    (latents,), (text,) = own["x"], own["cap_feats"]
    config, whole = ZImagePipelineConfig(), latents.unsqueeze(0)
    batch = sglang.Arguments(raw_latent_shape=tuple(whole.shape))
    compression = config.vae_config.arch_config.spatial_compression_ratio
    height, width = (compression * size for size in latents.shape[-2:])
    rotary = config.get_freqs_cis(text, width, height, latents.device, transformer.rotary_emb, batch=batch)
    mine, _ = config.shard_latents_for_sp(batch, whole)
    call = call_of(
        transformer,
        hidden_states=[*mine],
        encoder_hidden_states=[text],
        timestep=sglang.TRAINED_STEPS * (1 - own["t"]),
        freqs_cis=rotary,
        caption_valid_lens=torch.tensor([text.shape[0]], device=latents.device),
    )
    return lambda: -config.gather_noise_pred_for_sp(batch, call())  # its pipeline wants the opposite


def _wan(transformer: Any, own: Mapping[str, Any]) -> Call:
    from sglang.multimodal_gen.runtime.distributed.parallel_state import get_sp_world_size

    kept = {name: own[name] for name in ("hidden_states", "encoder_hidden_states", "timestep")}
    pictures = own.get("encoder_hidden_states_image")
    batch = sglang.Arguments(extra={}, enable_sequence_shard=get_sp_world_size() > 1, enable_teacache=False)
    images = None if pictures is None else [pictures]
    return call_of(transformer, batch, autocast=True, encoder_hidden_states_image=images, **kept)


def _cosmos(transformer: Any, own: Mapping[str, Any]) -> Call:
    """Prepare a call. The transformer caches each branch's text by name, and the positions of this rank's part."""
    from sglang.multimodal_gen.runtime.distributed.sp_shard_utils import shard_seq

    clip, text, branch = ClipOfText.of(own), transformer.language_model, f"branch {len(transformer.cached_kv)}"
    mask = torch.ones_like(clip.text_ids)
    with torch.inference_mode():
        transformer.cached_kv[branch] = text(clip.text_ids, mask, clip.text_positions)
        mine, _ = shard_seq(clip.positions, dim=2, pad_mode="repeat_last")
        rotary = text.rotary_emb.build_rope_cache_inputs(mine, cache_dtype=clip.latents.dtype)
        transformer.cached_gen_rope_inputs[branch] = rotary
    return call_of(
        transformer,
        hidden_states=clip.latents,
        encoder_hidden_states=None,
        timestep=clip.timestep,
        text_ids=clip.text_ids,
        text_mask=mask,
        max_text_seq_len=clip.text_ids.shape[1],
        sound_latents=clip.sound,
        cache_key=branch,
    )


MODELS: dict[str, tuple[str, str, Prepare]] = {
    "Flux2Transformer2DModel": ("flux_2", "flux:FluxConfig", _flux2),
    "QwenImageTransformer2DModel": ("qwen_image", "qwenimage:QwenImageDitConfig", _qwen),
    "ZImageTransformer2DModel": ("zimage", "zimage:ZImageDitConfig", _z_image),
    "WanTransformer3DModel": ("wanvideo", "wanvideo:WanVideoConfig", _wan),
    "Cosmos3OmniTransformer": ("cosmos3video", "cosmos3video:Cosmos3VideoConfig", _cosmos),
}
"""Places of the transformer and its configuration, and what prepares a call, by diffusers' class."""
NAMES = {"n_layers": "num_layers", "n_heads": "num_attention_heads", "rope_axes_dim": "mrope_section"}
"""Names of parameters in diffusers by those here, for Z-Image and Cosmos 3."""
