"""Check adapters in the names of models' own repositories: all kinds of layers, and those of other parts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import LTX2VideoTransformer3DModel
from diffusers.loaders.lora_conversion_utils import swap_scale_shift
from safetensors.torch import save_file
from torch import Tensor

from pipelines.lora.translation import translate_weights
from tests.pipelines.loading.test_transformer_names import LTX_SIZES
from tests.pipelines.lora.support.keys import RANK, Tensors, added, check, pair, plain, product, written


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)


HUNYUAN = {
    "lora_unet_double_blocks_1_img_attn_k": ("transformer_blocks.1.attn.to_k",),
    "lora_unet_double_blocks_0_txt_mlp_fc2": ("transformer_blocks.0.ff_context.net.2",),
    "lora_unet_double_blocks_0_img_mod_linear": ("transformer_blocks.0.norm1.linear",),
    "diffusion_model.double_blocks.1.img_attn.qkv": tuple(f"transformer_blocks.1.attn.to_{one}" for one in "qkv"),
    "diffusion_model.double_blocks.0.txt_attn.qkv": tuple(f"transformer_blocks.0.attn.add_{x}_proj" for x in "qkv"),
    "diffusion_model.double_blocks.0.img_mlp.0": ("transformer_blocks.0.ff.net.0.proj",),
    "lora_unet_double_blocks_0_img_attn_qkv": tuple(f"transformer_blocks.0.attn.to_{one}" for one in "qkv"),
    "diffusion_model.double_blocks.0.txt_mod.lin": ("transformer_blocks.0.norm1_context.linear",),
}
"""Layers by musubi-tuner's names, and ComfyUI's by its ``convert_hunyuan_video_1_5_lora_to_comfy``."""


@pytest.mark.parametrize("key", HUNYUAN)
def test_hunyuan_video_in_the_names_of_its_trainers(small: Callable[[str], Path], tmp_path: Path, key: str) -> None:
    base, names = plain(small("hunyuan")), [f"{name}.weight" for name in HUNYUAN[key]]
    rows = [len(base[name]) for name in names]
    tensors = pair(key, sum(rows), base[names[0]].shape[1], alpha=3.0)
    expected = torch.split(product(tensors, key, 3.0 / RANK), rows)
    check(added(small("hunyuan"), written(tensors, tmp_path)), dict(zip(names, expected, strict=True)))


def attention(layer: str, *ends: str) -> tuple[str, ...]:
    return tuple(f"{layer}.{end}" for end in ends or ("to_q", "to_k", "to_v"))


DUAL, SINGLE = "transformer_blocks", "single_transformer_blocks"
MAKERS: dict[str, dict[str, tuple[str, ...]]] = {
    "flux": {
        "double_blocks.0.img_attn.qkv": attention(f"{DUAL}.0.attn"),
        "double_blocks.1.txt_attn.qkv": attention(f"{DUAL}.1.attn", "add_q_proj", "add_k_proj", "add_v_proj"),
        "double_blocks.0.txt_attn.proj": (f"{DUAL}.0.attn.to_add_out",),
        "double_blocks.1.img_mlp.2": (f"{DUAL}.1.ff.net.2",),
        "double_blocks.1.txt_mod.lin": (f"{DUAL}.1.norm1_context.linear",),
        "single_blocks.1.linear1": (*attention(f"{SINGLE}.1.attn"), f"{SINGLE}.1.proj_mlp"),
        "single_blocks.0.linear2": (f"{SINGLE}.0.proj_out",),
        "single_blocks.0.modulation.lin": (f"{SINGLE}.0.norm.linear",),
        "guidance_in.out_layer": ("time_text_embed.guidance_embedder.linear_2",),
        "vector_in.in_layer": ("time_text_embed.text_embedder.linear_1",),
        "final_layer.linear": ("proj_out",),
        "final_layer.adaLN_modulation.1": ("norm_out.linear",),
    },
    "flux, DiffSynth-Studio": {
        "blocks.0.attn.b_to_qkv": attention(f"{DUAL}.0.attn", "add_q_proj", "add_k_proj", "add_v_proj"),
        "blocks.1.ff_a.2": (f"{DUAL}.1.ff.net.2",),
        "single_blocks.1.to_qkv_mlp": (*attention(f"{SINGLE}.1.attn"), f"{SINGLE}.1.proj_mlp"),
        "single_blocks.0.norm.linear": (f"{SINGLE}.0.norm.linear",),
    },
    "klein": {
        "double_blocks.0.img_attn.qkv": attention(f"{DUAL}.0.attn"),
        "double_stream_modulation_img.lin": ("double_stream_modulation_img.linear",),
        "final_layer.adaLN_modulation.1": ("norm_out.linear",),
    },
    "sd3": {
        "joint_blocks.0.x_block.attn.qkv": attention(f"{DUAL}.0.attn"),
        "joint_blocks.1.context_block.attn.qkv": attention(f"{DUAL}.1.attn", "add_q_proj", "add_k_proj", "add_v_proj"),
        "joint_blocks.0.context_block.attn.proj": (f"{DUAL}.0.attn.to_add_out",),
        "joint_blocks.0.context_block.mlp.fc1": (f"{DUAL}.0.ff_context.net.0.proj",),
        "joint_blocks.1.x_block.mlp.fc2": (f"{DUAL}.1.ff.net.2",),
        "joint_blocks.0.context_block.adaLN_modulation.1": (f"{DUAL}.0.norm1_context.linear",),
        "joint_blocks.1.context_block.adaLN_modulation.1": (f"{DUAL}.1.norm1_context.linear",),
        "joint_blocks.1.x_block.adaLN_modulation.1": (f"{DUAL}.1.norm1.linear",),
        "y_embedder.mlp.2": ("time_text_embed.text_embedder.linear_2",),
        "x_embedder.proj": ("pos_embed.proj",),
        "final_layer.adaLN_modulation.1": ("norm_out.linear",),
    },
    "ideogram": {
        "layers.0.attention.qkv": attention("layers.0.attention"),
        "layers.1.attention.o": ("layers.1.attention.to_out.0",),
        "layers.0.feed_forward.w2": ("layers.0.feed_forward.w2",),
        "llm_cond_proj": ("llm_cond_proj",),
    },
}
"""diffusers' layers by the original names of OneTrainer (``modules/model``) and kohya's scripts."""
SHIFT_FIRST = {"flux": {"norm_out.linear"}, "klein": {"norm_out.linear"}}
SHIFT_FIRST["sd3"] = {"norm_out.linear", f"{DUAL}.1.norm1_context.linear"}
"""Modulations with shift before scale in original names: last layers, and SD 3's last text layer."""


def divided(model: str, names: tuple[str, ...], base: Tensors, change: Tensor, end: str = "weight") -> Tensors:
    """Return the rows of ``change`` by parameter."""
    rows = torch.split(change, [len(base[f"{name}.weight"]) for name in names])
    turned = SHIFT_FIRST.get(model, set())
    return {f"{name}.{end}": swap_scale_shift(x) if name in turned else x for name, x in zip(names, rows, strict=True)}


@pytest.mark.parametrize("model", MAKERS)
@pytest.mark.parametrize(
    ("prefix", "spelling"),
    [("diffusion_model.", "A"), ("", "A"), ("lora_unet_", "down")],
    ids=["ComfyUI", "no prefix", "kohya"],
)
def test_layers_of_all_kinds_in_the_makers_names(
    small: Callable[[str], Path], tmp_path: Path, model: str, prefix: str, spelling: str
) -> None:
    folder = small(model.partition(",")[0])
    base, tensors, expected = plain(folder), Tensors(), Tensors()
    for layer, names in MAKERS[model].items():
        key = prefix + (layer if spelling == "A" else layer.replace(".", "_"))
        weights = [base[f"{name}.weight"].flatten(1) for name in names]
        tensors |= pair(key, sum(map(len, weights)), weights[0].shape[1], spelling=spelling, alpha=3.0)
        expected |= divided(model, names, base, product(tensors, key, 3.0 / RANK))
    check(added(folder, written(tensors, tmp_path)), expected)


@pytest.mark.parametrize("model", MAKERS)
def test_differences_of_all_kinds_in_the_makers_names(small: Callable[[str], Path], tmp_path: Path, model: str) -> None:
    """ComfyUI saves extracted differences under these names."""
    folder = small(model.partition(",")[0])
    base, tensors, expected = plain(folder), Tensors(), Tensors()
    for layer, names in MAKERS[model].items():
        for end, mark in (("weight", ".diff"), ("bias", ".diff_b")):
            own = [base[f"{name}.{end}"] for name in names if f"{name}.{end}" in base]
            if own:
                tensors[f"diffusion_model.{layer}{mark}"] = change = torch.randn(torch.cat(own).shape)
                expected |= divided(model, names, base, change, end)
    check(added(folder, written(tensors, tmp_path)), expected)


@pytest.mark.parametrize("stream", ["", "audio_"])
def test_modulation_by_prompts_in_its_makers_names(stream: str) -> None:
    """LTX-2.3 has these layers, which diffusers does not translate."""
    module = LTX2VideoTransformer3DModel(**LTX_SIZES)
    theirs, own = f"{stream}prompt_adaln_single.linear.weight", f"{stream}prompt_adaln.linear.weight"
    value = torch.randn(module.get_parameter(own).shape)
    ((name, read, source),) = translate_weights({theirs: value}, module)
    assert (name, source) == (own, theirs)
    assert torch.equal(read, value)


TEXTS = {
    "lora_te1_text_model_encoder_layers_0_self_attn_q_proj": "down",
    "lora_te_layers_0_self_attn_q_proj": "down",
    "text_encoders.clip_l.transformer.text_model.encoder.layers.0.mlp.fc1": "A",
    "text_encoder_3.encoder.block.0.layer.0.SelfAttention.q": "A",
    "lora_unet_llm_adapter_blocks_0_cross_attn_q_proj": "down",
}
"""Layers of text encoders and Anima's conditioner in the names of OneTrainer and kohya's scripts."""


@pytest.mark.parametrize(
    ("model", "key", "spelling", "name"),
    [
        ("qwen", "lora_unet_transformer_blocks_0_attn_to_k", "down", "transformer_blocks.0.attn.to_k"),
        ("flux", "diffusion_model.double_blocks.0.img_attn.proj", "A", "transformer_blocks.0.attn.to_out.0"),
        ("flux", "lora_transformer_transformer_blocks_0_attn_to_k", "down", "transformer_blocks.0.attn.to_k"),
        ("sd3", "lora_unet_joint_blocks_0_x_block_attn_proj", "down", "transformer_blocks.0.attn.to_out.0"),
        ("anima", "lora_unet_blocks_0_cross_attn_q_proj", "down", "transformer_blocks.0.attn2.to_q"),
        ("wan", "diffusion_model.blocks.0.self_attn.k", "A", "blocks.0.attn1.to_k"),
    ],
)
@pytest.mark.parametrize("text", TEXTS)
def test_text_encoders_are_named_or_left_out_in_any_layout(
    small: Callable[[str], Path], tmp_path: Path, model: str, key: str, spelling: str, name: str, text: str
) -> None:
    tensors = pair(key, *plain(small(model))[f"{name}.weight"].shape, spelling=spelling)
    file = written(tensors | pair(text, 4, 4, spelling=TEXTS[text]), tmp_path)
    with pytest.raises(ValueError, match=rf"{file} is not for the transformer alone: {text}\.lora.*part: transformer"):
        added(small(model), file)
    check(added(small(model), file, "transformer"), {f"{name}.weight": product(tensors, key)})


def test_patterns_of_alphas_are_of_the_makers_names(small: Callable[[str], Path], tmp_path: Path) -> None:
    """PEFT matches patterns with the names of the model that it trained."""
    key, name = "base_model.model.double_blocks.0.img_attn.proj", "transformer_blocks.0.attn.to_out.0.weight"
    tensors = pair(key, *plain(small("flux"))[name].shape, spelling="A")
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = {"r": RANK, "lora_alpha": 2, "alpha_pattern": {"to_out.0": 7, "img_attn.proj": 5}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    check(added(small("flux"), tmp_path), {name: product(tensors, key, 5 / RANK)})
