"""SGLang's and vLLM-Omni's transformers of FLUX.2, Z-Image, Qwen-Image and Wan as published, on one GPU."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from benchmarks.models.published import PublishedModel
from benchmarks.peers import sglang, vllm_omni
from benchmarks.peers.step import SGLANG_COMPILED, begin_alone

MAKERS = ("vllm-omni", "vllm-omni-eager", "sglang", "sglang-blocks")
Call = Callable[[], Any]
Prepare = Callable[[Any, Mapping[str, Any]], Call]
"""From a peer's transformer and one branch's arguments of diffusers' module to the forward of that branch. What a
pipeline makes once a job is made here."""


def peer_of(model: PublishedModel, maker: str) -> Callable[[], Tensor]:
    """Returns a step of all branches that gives what ``model.call`` gives, in inference mode.

    ValueError for makers and transformers that are not here, and beside other ranks.
    """
    if maker not in MAKERS:
        raise ValueError(f"unknown peer {maker!r}; known: {', '.join(MAKERS)}")
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError("peers are timed with this model on one GPU")
    transformer, prepare = (_of_sglang if maker.startswith("sglang") else _of_vllm_omni)(model, maker)
    calls = [prepare(transformer, own) for own in model.own_calls]

    @torch.inference_mode()
    def step() -> Tensor:
        outputs = [call() for call in calls]
        return torch.cat([x.flatten() for x in tree_leaves(outputs) if isinstance(x, Tensor)])

    return step


def _of_vllm_omni(model: PublishedModel, maker: str) -> tuple[Any, Prepare]:
    """Its blocks compiled as it ships, or eager; the weights are copies."""
    module, name = model.module, type(model.module).__name__
    place, prepare = _known(VLLM_OMNI, name)
    if name.startswith("Flux2") and module.config.guidance_embeds:
        place = "flux2.flux2_transformer"  # klein has a file of its own
    begin_alone()
    od_config = vllm_omni.begin(next(module.parameters()).dtype, "native")
    transformer_class = getattr(importlib.import_module(f"vllm_omni.diffusion.models.{place}"), name)
    known = {**module.config, "od_config": od_config}
    options = {key: known[key] for key in inspect.signature(transformer_class).parameters if key in known}
    transformer = vllm_omni.loaded(transformer_class, options, module, od_config)
    if "eager" not in maker:
        vllm_omni.compile_blocks(transformer, od_config)
    return transformer, prepare


def _of_sglang(model: PublishedModel, maker: str) -> tuple[Any, Prepare]:
    """Eager as it ships, or its blocks compiled."""
    module, name = model.module, type(model.module).__name__
    place, configs, prepare = _known(SGLANG, name)
    begin_alone()
    sglang.begin(1)
    transformer_class = getattr(importlib.import_module(f"sglang.multimodal_gen.runtime.models.dits.{place}"), name)
    config_module, config_class = configs.split(":")
    config = getattr(
        importlib.import_module(f"sglang.multimodal_gen.configs.models.dits.{config_module}"), config_class
    )()
    options = {SGLANG_NAMES.get(key, key): value for key, value in module.config.items() if not key.startswith("_")}
    config.update_model_arch(options)
    return sglang.loaded(transformer_class, config, module, SGLANG_COMPILED[maker]), prepare


def _known(table: Mapping[str, Any], name: str) -> Any:
    if name not in table:
        raise ValueError(f"peers are timed for {', '.join(table)}, not for {name}")
    return table[name]


def _omni_flux2(transformer: Any, own: Mapping[str, Any]) -> Call:
    return lambda: transformer(**own, return_dict=False)[0]


def _omni_qwen(transformer: Any, own: Mapping[str, Any]) -> Call:
    lengths = [own["encoder_hidden_states"].shape[1]]
    return lambda: transformer(**own, txt_seq_lens=lengths).sample


def _omni_wan(transformer: Any, own: Mapping[str, Any]) -> Call:
    return lambda: transformer(**own, return_dict=False)[0]


def _omni_z_image(transformer: Any, own: Mapping[str, Any]) -> Call:
    return lambda: transformer(own["x"], own["t"], own["cap_feats"])[0]


def _sglang_call(transformer: Any, batch: Any = None, **arguments: Any) -> Call:
    """``batch``: its request, whose steps keep there what they share."""
    from sglang.multimodal_gen.runtime.managers.forward_context import set_forward_context

    def call() -> Any:
        with set_forward_context(current_timestep=0, attn_metadata=None, forward_batch=batch):
            return transformer(**arguments)

    return call


def _sglang_flux2(transformer: Any, own: Mapping[str, Any]) -> Call:
    text, picture = (transformer.rotary_emb(own[ids].flatten(0, -2)) for ids in ("txt_ids", "img_ids"))
    rotary = tuple(torch.cat(pair, dim=0) for pair in zip(text, picture, strict=True))
    kept = {name: own[name] for name in ("hidden_states", "encoder_hidden_states", "guidance")}
    return _sglang_call(transformer, **kept, timestep=own["timestep"] * sglang.TRAINED_STEPS, freqs_cis=rotary)


def _sglang_qwen(transformer: Any, own: Mapping[str, Any]) -> Call:
    from sglang.multimodal_gen.configs.pipeline_configs.qwen_image import QwenImagePipelineConfig

    hidden, text = own["hidden_states"], own["encoder_hidden_states"]
    lengths = [text.shape[1]]
    caches, freqs = QwenImagePipelineConfig.get_freqs_cis(
        own["img_shapes"], lengths, transformer.rotary_emb, hidden.device, hidden.dtype
    )
    return _sglang_call(
        transformer,
        hidden_states=hidden,
        encoder_hidden_states=text,
        timestep=own["timestep"] * sglang.TRAINED_STEPS,
        img_shapes=own["img_shapes"],
        txt_seq_lens=lengths,
        freqs_cis=caches,
        freqs_complex=freqs,
    )


def _sglang_z_image(transformer: Any, own: Mapping[str, Any]) -> Call:
    from sglang.multimodal_gen.configs.pipeline_configs.zimage import ZImagePipelineConfig

    (latents,), (text,) = own["x"], own["cap_feats"]
    config = ZImagePipelineConfig()
    compression = config.vae_config.arch_config.spatial_compression_ratio
    height, width = (compression * size for size in latents.shape[-2:])
    rotary = config.get_freqs_cis(text, width, height, latents.device, transformer.rotary_emb, batch=None)
    call = _sglang_call(
        transformer,
        hidden_states=[latents],
        encoder_hidden_states=[text],
        timestep=sglang.TRAINED_STEPS * (1 - own["t"]),
        freqs_cis=rotary,
        caption_valid_lens=torch.tensor([text.shape[0]], device=latents.device),
    )
    return lambda: -call()  # its pipeline wants the opposite


def _sglang_wan(transformer: Any, own: Mapping[str, Any]) -> Call:
    kept = {name: own[name] for name in ("hidden_states", "encoder_hidden_states", "timestep")}
    pictures = own.get("encoder_hidden_states_image")
    batch = sglang.Arguments(extra={}, enable_sequence_shard=False, enable_teacache=False, enable_spectrum=False)
    images = None if pictures is None else [pictures]
    return _sglang_call(transformer, batch, encoder_hidden_states_image=images, **kept)


VLLM_OMNI: dict[str, tuple[str, Prepare]] = {
    "Flux2Transformer2DModel": ("flux2_klein.flux2_klein_transformer", _omni_flux2),
    "QwenImageTransformer2DModel": ("qwen_image.qwen_image_transformer", _omni_qwen),
    "ZImageTransformer2DModel": ("z_image.z_image_transformer", _omni_z_image),
    "WanTransformer3DModel": ("wan2_2.wan2_2_transformer", _omni_wan),
}
SGLANG: dict[str, tuple[str, str, Prepare]] = {
    "Flux2Transformer2DModel": ("flux_2", "flux:FluxConfig", _sglang_flux2),
    "QwenImageTransformer2DModel": ("qwen_image", "qwenimage:QwenImageDitConfig", _sglang_qwen),
    "ZImageTransformer2DModel": ("zimage", "zimage:ZImageDitConfig", _sglang_z_image),
    "WanTransformer3DModel": ("wanvideo", "wanvideo:WanVideoConfig", _sglang_wan),
}
SGLANG_NAMES = {"n_layers": "num_layers", "n_heads": "num_attention_heads"}
"""Of diffusers' Z-Image, under its own."""
