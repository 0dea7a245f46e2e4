"""Transformers in original and ComfyUI's names, some of which diffusers does not translate."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import save_file

from pipelines.single_file import load_single_file
from tests.pipelines.support.checkpoints.damage import Tensors
from tests.pipelines.support.checkpoints.parts import shake

DUAL = {
    "img_attn.qkv": "attn.to_q attn.to_k attn.to_v",
    "txt_attn.qkv": "attn.add_q_proj attn.add_k_proj attn.add_v_proj",
    "img_attn.norm.query_norm": "attn.norm_q",
    "img_attn.norm.key_norm": "attn.norm_k",
    "txt_attn.norm.query_norm": "attn.norm_added_q",
    "txt_attn.norm.key_norm": "attn.norm_added_k",
    "img_attn.proj": "attn.to_out.0",
    "txt_attn.proj": "attn.to_add_out",
    "img_mlp.0": "ff.net.0.proj",
    "img_mlp.2": "ff.net.2",
    "txt_mlp.0": "ff_context.net.0.proj",
    "txt_mlp.2": "ff_context.net.2",
    "img_mod.lin": "norm1.linear",
    "txt_mod.lin": "norm1_context.linear",
}
SINGLE = {
    "linear1": "attn.to_q attn.to_k attn.to_v proj_mlp",
    "linear2": "proj_out",
    "modulation.lin": "norm.linear",
    "norm.query_norm": "attn.norm_q",
    "norm.key_norm": "attn.norm_k",
}
REFINER = {
    "self_attn.qkv": "attn.to_q attn.to_k attn.to_v",
    "self_attn.proj": "attn.to_out.0",
    "mlp.0": "ff.net.0.proj",
    "mlp.2": "ff.net.2",
    "adaLN_modulation.1": "norm_out.linear",
    "norm1": "norm1",
    "norm2": "norm2",
}


def inside(theirs: str, own: str, layers: Mapping[str, str]) -> dict[str, str]:
    """Return the layers of a module by full names."""
    return {theirs + one: " ".join(own + name for name in names.split()) for one, names in layers.items()}


def embedder(own: str) -> dict[str, str]:
    return {"in_layer": f"{own}.linear_1", "out_layer": f"{own}.linear_2"}


LAST = {"final_layer.linear": "proj_out", "final_layer.adaLN_modulation.1": "norm_out.linear"}
TIMES, TEXTS = "time_embed.", "context_embedder.time_text_embed."
FLUX = {
    **inside("double_blocks.0.", "transformer_blocks.0.", DUAL),
    **inside("single_blocks.0.", "single_transformer_blocks.0.", SINGLE),
    **inside("time_in.", "time_text_embed.", embedder("timestep_embedder")),
    **inside("vector_in.", "time_text_embed.", embedder("text_embedder")),
    **inside("guidance_in.", "time_text_embed.", embedder("guidance_embedder")),
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    **LAST,
}
HUNYUAN = {
    **inside("double_blocks.0.", "transformer_blocks.0.", DUAL),
    **inside("txt_in.individual_token_refiner.blocks.0.", "context_embedder.token_refiner.refiner_blocks.0.", REFINER),
    **inside("time_in.", TIMES, embedder("timestep_embedder")),
    **inside("txt_in.t_embedder.", TEXTS, embedder("timestep_embedder")),
    **inside("txt_in.c_embedder.", TEXTS, embedder("text_embedder")),
    "txt_in.input_embedder": "context_embedder.proj_in",
    "img_in.proj": "x_embedder.proj",
    **inside("byt5_in.", "context_embedder_2.", {"layernorm": "norm"} | {f"fc{n}": f"linear_{n}" for n in (1, 2, 3)}),
    **inside("vision_in.proj.", "image_embedder.", {"0": "norm_in", "1": "linear_1", "3": "linear_2", "4": "norm_out"}),
    "cond_type_embedding": "cond_type_embed",
    **LAST,
}
"""diffusers' layers by the names of ComfyUI's classes ``Flux`` and ``HunyuanVideo``."""
STUDIO_DUAL = {
    "attn.a_to_qkv": "attn.to_q attn.to_k attn.to_v",
    "attn.b_to_qkv": "attn.add_q_proj attn.add_k_proj attn.add_v_proj",
    "attn.norm_q_a": "attn.norm_q",
    "attn.norm_k_a": "attn.norm_k",
    "attn.norm_q_b": "attn.norm_added_q",
    "attn.norm_k_b": "attn.norm_added_k",
    "attn.a_to_out": "attn.to_out.0",
    "attn.b_to_out": "attn.to_add_out",
    "ff_a.0": "ff.net.0.proj",
    "ff_a.2": "ff.net.2",
    "ff_b.0": "ff_context.net.0.proj",
    "ff_b.2": "ff_context.net.2",
    "norm1_a.linear": "norm1.linear",
    "norm1_b.linear": "norm1_context.linear",
}
STUDIO_SINGLE = {
    "to_qkv_mlp": "attn.to_q attn.to_k attn.to_v proj_mlp",
    "norm_q_a": "attn.norm_q",
    "norm_k_a": "attn.norm_k",
    "norm.linear": "norm.linear",
    "proj_out": "proj_out",
}
STUDIO = {
    **inside("blocks.0.", "transformer_blocks.0.", STUDIO_DUAL),
    **inside("single_blocks.0.", "single_transformer_blocks.0.", STUDIO_SINGLE),
    **{
        f"{theirs}.{end}": f"time_text_embed.{own}.linear_{number}"
        for theirs, own in (
            ("time_embedder.timestep_embedder", "timestep_embedder"),
            ("guidance_embedder.timestep_embedder", "guidance_embedder"),
            ("pooled_text_embedder", "text_embedder"),
        )
        for end, number in ((0, 1), (2, 2))
    },
    "final_norm_out.linear": "norm_out.linear",
    "final_proj_out": "proj_out",
}
"""Layers by the names of DiffSynth-Studio's class ``FluxDiT``."""
TENCENT = {
    r"mlp\.0": "mlp.fc1",
    r"mlp\.2": "mlp.fc2",
    r"(time_in|t_embedder)\.in_layer": r"\1.mlp.0",
    r"(time_in|t_embedder)\.out_layer": r"\1.mlp.2",
    r"c_embedder\.in_layer": "c_embedder.linear_1",
    r"c_embedder\.out_layer": "c_embedder.linear_2",
    r"_mod\.lin\.": "_mod.linear.",
    r"_attn\.norm\.(q|k)[a-z]+_norm": r"_attn_\1_norm",
    r"_attn\.(qkv|proj)": r"_attn_\1",
}
"""Tencent's names (``hunyuanvideo_1_5_transformer.py``) by patterns of ComfyUI's."""
IDEOGRAM = inside("layers.0.attention.", "layers.0.attention.", {"qkv": "to_q to_k to_v", "o": "to_out.0"})


def in_layers(own: Tensors, layers: Mapping[str, str], norm: str = "weight") -> Tensors:
    """Return joined layers with consecutive rows and shift before scale; other tensors unchanged."""
    rest, written = dict(own), {}
    for theirs, names in layers.items():
        for end in ("weight", "bias"):
            rows = [rest.pop(key) for name in names.split() if (key := f"{name}.{end}") in rest]
            if rows:
                key = f"{theirs}.{norm if theirs.endswith(('query_norm', 'key_norm')) else end}"
                written[key] = torch.cat(rows)
                if names == "norm_out.linear" and theirs.startswith("final"):
                    written[key] = torch.cat(written[key].chunk(2)[::-1])
    return written | rest


def renamed(own: Tensors, names: Mapping[str, str], prefix: str = "") -> Tensors:
    written = Tensors()
    for name, x in own.items():
        for pattern, theirs in names.items():
            name = re.sub(pattern, theirs, name)
        written[prefix + name] = x
    return written


FLUX_SIZES = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 8, "num_attention_heads": 2}
FLUX_SIZES |= {"joint_attention_dim": 6, "pooled_projection_dim": 5, "guidance_embeds": True}
HUNYUAN_SIZES = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "num_refiner_layers": 1}
HUNYUAN_SIZES |= {"in_channels": 5, "out_channels": 2, "text_embed_dim": 6, "text_embed_2_dim": 7, "image_embed_dim": 3}
WAN_SIZES = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "ffn_dim": 8, "text_dim": 6}
WAN_SIZES |= {"in_channels": 8, "image_dim": 10, "added_kv_proj_dim": 16, "pos_embed_seq_len": 6}
IDEOGRAM_SIZES: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "num_layers": 1,
    "intermediate_size": 8,
}
IDEOGRAM_SIZES |= {"in_channels": 4, "adaln_dim": 4, "llm_features_dim": 6, "mrope_section": (2, 1, 1)}
LTX_SIZES: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "cross_attention_dim": 16,
    "num_layers": 1,
}
LTX_SIZES |= {"audio_num_attention_heads": 2, "audio_attention_head_dim": 4, "audio_cross_attention_dim": 8}
LTX_SIZES |= {"in_channels": 4, "audio_in_channels": 4, "cross_attn_mod": True, "audio_cross_attn_mod": True}
LTX_SIZES |= {"use_prompt_embeddings": False}
QWEN_SIZES: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "num_layers": 1,
    "joint_attention_dim": 6,
}
QWEN_SIZES |= {"in_channels": 4, "axes_dims_rope": (2, 2, 4)}
MARK = {"__index_timestep_zero__": torch.zeros(0)}
"""Key that ComfyUI's file of Qwen-Image-Edit-2511 has instead of a setting."""
HUNYUAN_FILE = partial(in_layers, layers=HUNYUAN)
FILES: dict[str, tuple[str, Mapping[str, Any], Callable[[Tensors], Tensors]]] = {
    "FLUX.1": ("FluxTransformer2DModel", FLUX_SIZES, partial(in_layers, layers=FLUX, norm="scale")),
    "FLUX.1, saved by ComfyUI": ("FluxTransformer2DModel", FLUX_SIZES, partial(in_layers, layers=FLUX)),
    "FLUX.1, DiffSynth-Studio": ("FluxTransformer2DModel", FLUX_SIZES, partial(in_layers, layers=STUDIO)),
    "HunyuanVideo 1.5": (
        "HunyuanVideo15Transformer3DModel",
        HUNYUAN_SIZES,
        lambda own: renamed(HUNYUAN_FILE(own), TENCENT),
    ),
    "HunyuanVideo 1.5, repackaged": ("HunyuanVideo15Transformer3DModel", HUNYUAN_SIZES, HUNYUAN_FILE),
    "HunyuanVideo 1.5, saved by ComfyUI": (
        "HunyuanVideo15Transformer3DModel",
        HUNYUAN_SIZES,
        lambda own: renamed(HUNYUAN_FILE(own), {}, "model.model."),
    ),
    "Ideogram 4": ("Ideogram4Transformer2DModel", IDEOGRAM_SIZES, partial(in_layers, layers=IDEOGRAM)),
    "Wan 2.1, first and last picture": (
        "WanTransformer3DModel",
        WAN_SIZES,
        partial(
            renamed, names={r"^condition_embedder\.image_embedder\.pos_embed$": "img_emb.emb_pos", "norm2": "norm3"}
        ),
    ),
    "LTX-2.3": (
        "LTX2VideoTransformer3DModel",
        LTX_SIZES,
        partial(renamed, names={"prompt_adaln": "prompt_adaln_single"}, prefix="model.diffusion_model."),
    ),
    "Qwen-Image-Edit-2511": ("QwenImageTransformer2DModel", QWEN_SIZES | {"zero_cond_t": True}, lambda own: own | MARK),
}


def read(name: str, folder: Path, sizes: Mapping[str, Any], tensors: Tensors) -> Tensors:
    kind = getattr(diffusers, name)
    kind(**sizes).save_config(folder)
    save_file({key: x.contiguous() for key, x in tensors.items()}, folder / "theirs.safetensors")
    model = load_single_file(kind, folder / "theirs.safetensors", folder, torch.device("cpu"), torch.float32)
    return dict(model.state_dict())


@pytest.mark.parametrize("file", FILES)
def test_every_tensor_is_that_of_the_file(tmp_path: Path, file: str) -> None:
    name, sizes, written = FILES[file]
    own = dict(shake(getattr(diffusers, name)(**sizes)).state_dict())
    theirs = written(own)
    assert theirs.keys() != own.keys()
    found = read(name, tmp_path, sizes, theirs)
    assert found.keys() == own.keys()
    assert all(torch.equal(found[key], x) for key, x in own.items())


def test_a_mark_needs_its_setting(tmp_path: Path) -> None:
    """Without the setting, references would be modulated by the step's time."""
    own = dict(diffusers.QwenImageTransformer2DModel(**QWEN_SIZES).state_dict())
    with pytest.raises(
        ValueError, match=r"it has __index_timestep_zero__, and the configuration no zero_cond_t\): give the base"
    ):
        read("QwenImageTransformer2DModel", tmp_path, QWEN_SIZES, own | MARK)
