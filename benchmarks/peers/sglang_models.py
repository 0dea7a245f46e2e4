"""SGLang's transformers of the models that published.py times, called as its pipelines call them."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.models.making import without_init
from benchmarks.models.published import PublishedModel
from benchmarks.peers import sglang
from benchmarks.peers.calls import Call, ClipOfText, Prepare, known, modulation_sizes, packed_clip, packed_time
from engines.core.spec import ParallelSpec

GROUPS = "sglang.multimodal_gen.runtime.distributed.parallel_state"
"""Module of its groups of ranks."""
COMPILED: dict[str, sglang.Compiled] = {
    "sglang": "",
    "sglang-graphs": "graphs",
    "sglang-blocks": "blocks",
    "sglang-compiled": "whole",
}
"""How each maker is compiled."""
FLUX3 = "Flux3Transformer2DModel"
FLUX3_NAMES = {
    r"^timestep_embedder\.linear_1": "time_in.in_layer",
    r"^timestep_embedder\.linear_2": "time_in.out_layer",
    r"^target_timestep_embedder\.linear_1": "ref_time_in.in_layer",
    r"^target_timestep_embedder\.linear_2": "ref_time_in.out_layer",
    r"^(\w+_stream_modulations\.\w+)\.linear": r"\1.lin",
    r"^x_embedders": "emb_in",
    r"^context_embedder": "txt_in",
    r"^mode_blocks": "content_mode_blocks",
    r"^single_transformer_blocks": "single_blocks",
    r"attn\.to_(.)\.": r"\1_proj.",
    r"attn\.norm_q": "norm.query_norm",
    r"attn\.norm_k": "norm.key_norm",
    r"attn\.to_out\.0": "attn_out",
    r"ff\.linear_in": "mlp_in",
    r"ff\.linear_out": "mlp_out",
    r"^proj_out": "final_layer.image.linear",
    r"^norm_out\.linear": "final_layer.image.adaLN_modulation.1",
}
"""Patterns of diffusers' names of weights, and the checkpoints' names."""
MINIMAX = "MiniMaxH3Transformer3DModel"
MINIMAX_STAGES = "sglang.multimodal_gen.runtime.pipelines_core.stages.model_specific_stages.minimax_h3"


def transformer_of(
    model: PublishedModel, maker: str, layout: ParallelSpec, precision: str = "native"
) -> tuple[Any, Prepare]:
    """Return the transformer, eager as it ships or with compiled blocks, and what prepares a call."""
    module, name = model.module, type(model.module).__name__
    place, configs, prepare = known(MODELS, name)
    sglang.begin(layout)
    place, _, own_name = place.partition(":")
    models = importlib.import_module(f"sglang.multimodal_gen.runtime.models.dits.{place}")
    transformer_class = getattr(models, own_name or name)
    config_module, config_class = configs.split(":")
    config = getattr(
        importlib.import_module(f"sglang.multimodal_gen.configs.models.dits.{config_module}"), config_class
    )()
    options = {NAMES.get(key, key): value for key, value in module.config.items() if not key.startswith("_")}
    options = OPTIONS[name](module.config) if name in OPTIONS else options
    config.update_model_arch(options)
    weights = WEIGHTS[name](module) if name in WEIGHTS else module.state_dict()
    return sglang.loaded(transformer_class, config, module, COMPILED[maker], precision, weights), prepare


def call_of(transformer: Any, batch: Any = None, *, autocast: bool = False, **arguments: Any) -> Call:
    """Return the call of one step. ``batch`` is its request.

    ``autocast`` is how its pipelines call some models in bfloat16: where ``enable_autocast`` of the pipeline's
    configuration is on and its stage of denoising heeds it.
    """
    from sglang.multimodal_gen.runtime.managers.forward_context import set_forward_context

    device = next(transformer.parameters()).device
    casts = autocast and any(parameter.dtype == torch.bfloat16 for parameter in transformer.parameters())

    def call() -> Any:
        with (
            set_forward_context(current_timestep=0, attn_metadata=None, forward_batch=batch),
            torch.autocast(device.type, torch.bfloat16, enabled=casts),
        ):
            return transformer(**arguments)

    return call


def call_in_parts(transformer: Any, tokens_BSD: Tensor, **arguments: Any) -> Call:
    """Return a call that divides the picture's tokens among the ranks and gathers their predictions.

    ``arguments`` of these tokens are already divided. The transformer divides tokens of text itself.
    """
    from sglang.multimodal_gen.runtime.distributed.sp_shard_utils import gather_seq, shard_seq

    mine, plan = shard_seq(tokens_BSD)
    call = call_of(transformer, hidden_states=mine, **arguments)
    return lambda: gather_seq(call(), plan.orig_len)


def rotary_in_parts(transformer: Any, text_ids: Tensor, picture_ids: Tensor) -> tuple[Tensor, ...]:
    """Return cosines and sines of all text and of this rank's part of the picture, from FLUX's ids (tokens, axes)."""
    from sglang.multimodal_gen.configs.pipeline_configs.base import shard_rotary_emb_for_sp

    text, picture = (transformer.rotary_emb(ids.flatten(0, -2)) for ids in (text_ids, picture_ids))
    mine = map(shard_rotary_emb_for_sp, picture)
    return tuple(torch.cat(pair, dim=0) for pair in zip(text, mine, strict=True))


def _flux(transformer: Any, own: Mapping[str, Any]) -> Call:
    return call_in_parts(
        transformer,
        own["hidden_states"],
        encoder_hidden_states=own["encoder_hidden_states"],
        pooled_projections=own["pooled_projections"],
        guidance=None if own["guidance"] is None else own["guidance"] * sglang.TRAINED_STEPS,
        timestep=own["timestep"] * sglang.TRAINED_STEPS,
        freqs_cis=rotary_in_parts(transformer, own["txt_ids"], own["img_ids"]),
    )


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


def flux3_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return its configuration of a FLUX.3: streams of pictures and of reference pictures, one of which it predicts."""
    streams = {"image": config["in_channels"], "image_cond": config["cond_in_channels"]}
    return {
        "in_channels": streams,
        "sequence": {f"x_{name}": name for name in streams},
        "out_modes": ["image"],
        "vec_in_dim": None,
        "context_in_dim": config["joint_attention_dim"],
        "hidden_size": config["num_attention_heads"] * config["attention_head_dim"],
        "num_attention_heads": config["num_attention_heads"],
        "depth": config["num_layers"],
        "depth_single_blocks": config["num_single_layers"],
        "axes_dim": tuple(config["axes_dims_rope"]),
        "theta": config["rope_theta"],
        "mlp_ratio": config["mlp_ratio"],
        "flow_map": config["flow_map"],
    }


def flux3_weights(module: Any) -> dict[str, Tensor]:
    """Return diffusers' weights of a FLUX.3 by the names of its checkpoints, which SGLang reads."""
    weights = module.state_dict()
    scale_shift = weights["norm_out.linear.weight"]
    renamed = {_flux3_name(name): weight for name, weight in weights.items()}
    renamed["final_layer.image.adaLN_modulation.1.weight"] = torch.cat(scale_shift.chunk(2)[::-1])
    return renamed


def _flux3_name(name: str) -> str:
    for pattern, own in FLUX3_NAMES.items():
        name = re.sub(pattern, own, name)
    return name


def _flux3(transformer: Any, own: Mapping[str, Any]) -> Call:
    """Prepare a call with all tokens of text and picture in one sequence. The transformer divides it itself."""
    from sglang.multimodal_gen.runtime.models.dits.flux3_image import TEXT, pack

    text, picture = (own["encoder_hidden_states"][0], own["txt_ids"]), (own["hidden_states"][0], own["img_ids"])
    packed = pack([{TEXT: text, "image": picture}], {**transformer.in_channels, TEXT: text[0].shape[1]})
    packed.rope = {mode: transformer.rope(ids) for mode, ids in packed.ids.items()}
    num_times = None if transformer.flow_map else 1  # its quality "lossless" embeds a stream's one time once
    packed.timesteps = {mode: times[:num_times].to(text[0].dtype) for mode, times in packed.timesteps.items()}
    packed.timesteps["image"].fill_(own["timestep"].item())
    packed.timesteps_ref = own["target_timestep"].float() if "target_timestep" in own else None
    call = call_of(transformer, autocast=True, packed=packed)
    return lambda: call()["image"]


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


def _ltx2(transformer: Any, own: Mapping[str, Any]) -> Call:
    """Prepare a call. Each rank has whole frames of the clip, and all of its sound.

    The transformer keeps one branch's keys and values of text: its pipeline makes branches in one batch.
    """
    from sglang.multimodal_gen.configs.pipeline_configs.ltx_2 import LTX2PipelineConfig
    from sglang.multimodal_gen.runtime.distributed.parallel_state import get_sp_parallel_rank, get_sp_world_size

    if transformer._prompt_kv_buffers or own["num_frames"] % get_sp_world_size() or not _all_valid(own):
        raise ValueError("SGLang is timed for one branch of LTX-2 without padding, with equal frames for each rank")
    config, ranks = LTX2PipelineConfig(), get_sp_world_size()
    size = {name: config.vae_scale_factor * own[name] for name in ("height", "width")}
    batch = sglang.Arguments(**size)
    mine, _ = config.shard_latents_for_sp(batch, own["hidden_states"])
    with torch.inference_mode():
        texts = (own["encoder_hidden_states"], own["audio_encoder_hidden_states"])
        prompt = transformer.prepare_prompt_kv(*texts)
    kept = ("audio_hidden_states", "timestep", "audio_timestep", "height", "width", "fps", "audio_num_frames")
    call = call_of(
        transformer,
        autocast=True,
        hidden_states=mine,
        encoder_hidden_states=None,
        audio_encoder_hidden_states=None,
        num_frames=own["num_frames"] // ranks,
        video_coords=own["video_coords"].chunk(ranks, dim=2)[get_sp_parallel_rank() if ranks > 1 else 0],
        audio_coords=own["audio_coords"],
        cached_prompt_kv=prompt,
        return_latents=False,
        return_dict=False,
        **{name: own[name] for name in kept},
    )

    def whole() -> tuple[Tensor, Tensor]:
        clip, sound = call()
        return config.gather_latents_for_sp(clip, batch), sound

    return whole


def _all_valid(own: Mapping[str, Any]) -> bool:
    return all(bool(own[name].all()) for name in ("encoder_attention_mask", "audio_encoder_attention_mask"))


def minimax_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return its configuration of MiniMax-H3, for weights in diffusers' order."""
    own = {name: value for name, value in config.items() if not name.startswith("_")}
    return {**own, **modulation_sizes(own), "checkpoint_uses_diffusers_layout": True}


def minimax_weights(module: Any) -> dict[str, Tensor]:
    """Return diffusers' weights by its own names, stacked by its own loader, and a copy of the frequencies."""
    from sglang.multimodal_gen.runtime.models.dits.minimax_h3 import _diffusers_h3_checkpoint

    frequencies = module.rope.inv_freq.to(torch.float32, copy=True)
    return {**dict(_diffusers_h3_checkpoint(module.state_dict().items())), "rope.inv_freq": frequencies}


def _minimax(transformer: Any, own: Mapping[str, Any]) -> Call:
    """Prepare a call, with text and rotary embedding made before, as its stage of denoising does."""
    parents = MINIMAX_STAGES.split(".")
    without_init(parents[0], *(".".join(parents[:end]) for end in range(5, len(parents) + 1)))
    loop = importlib.import_module(f"{MINIMAX_STAGES}.denoise_loop")
    device, time = own["hidden_states"].device, packed_time(own)
    branch = loop.MiniMaxH3DenoiseBranch(**packed_clip(own), device=device)
    given = branch.static_kwargs
    with torch.inference_mode():
        lengths = given["refiner_packed_seq_params"]["cu_seqlens_q"]
        text = transformer.refine_prompt_embeds(given["prompt_embeds"], lengths, device=device)
        rotary = transformer.build_rope_cache(given["img_position_ids"], device=device)
    given |= {"prompt_embeds": text, "refined_prompt_embeds_length": len(text), "rope_cache": rotary}
    times = branch.prepare_timestep_plan(
        video_timesteps=[time],
        audio_timesteps=[time],
        imgvid_cond_noise_aug=time,
        audio_ref_cond_noise_aug=time,
    )
    rows = {"video_rows": own["hidden_states"][0], "audio_rows": own["audio_hidden_states"][0]}
    return call_of(transformer, **branch.forward_kwargs(**rows, step_timesteps=times[0]))


MODELS: dict[str, tuple[str, str, Prepare]] = {
    "FluxTransformer2DModel": ("flux", "flux:FluxConfig", _flux),
    "Flux2Transformer2DModel": ("flux_2", "flux:FluxConfig", _flux2),
    "QwenImageTransformer2DModel": ("qwen_image", "qwenimage:QwenImageDitConfig", _qwen),
    "ZImageTransformer2DModel": ("zimage", "zimage:ZImageDitConfig", _z_image),
    FLUX3: ("flux3_image:Flux3ImageDiT", "flux3:Flux3DiTConfig", _flux3),
    "WanTransformer3DModel": ("wanvideo", "wanvideo:WanVideoConfig", _wan),
    "Cosmos3OmniTransformer": ("cosmos3video", "cosmos3video:Cosmos3VideoConfig", _cosmos),
    "LTX2VideoTransformer3DModel": ("ltx_2", "ltx_2:LTX2Config", _ltx2),
    MINIMAX: ("minimax_h3:MiniMaxH3DiTModel", "minimax_h3:MiniMaxH3DiTConfig", _minimax),
}
"""Places of the transformer (with its name, where it has its own) and of its configuration, and what prepares a call,
by diffusers' class."""
NAMES = {"n_layers": "num_layers", "n_heads": "num_attention_heads", "rope_axes_dim": "mrope_section"}
"""Names of parameters in diffusers by those here, for Z-Image and Cosmos 3."""
OPTIONS = {FLUX3: flux3_options, MINIMAX: minimax_options}
"""Functions that make its configuration from that of diffusers, where names are not enough."""
WEIGHTS = {FLUX3: flux3_weights, MINIMAX: minimax_weights}
"""Functions that make its weights from diffusers' module, where names of parameters are not enough."""
