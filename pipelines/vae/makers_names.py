"""Makers' names of an auto-encoder's weights that diffusers translates in its conversion scripts only.

Scripts: ``convert_wan_to_diffusers.py`` (Wan 2.2), ``convert_hunyuan_video1_5_to_diffusers.py`` and
``convert_minimax_h3_to_diffusers.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Size, Tensor

HALF = r"^(en|de)coder\."
NESTED = {
    r"^conv1\.": "quant_conv.",
    r"^conv2\.": "post_quant_conv.",
    rf"{HALF}conv1\.": r"\1coder.conv_in.",
    rf"{HALF}head\.0\.": r"\1coder.norm_out.",
    rf"{HALF}head\.2\.": r"\1coder.conv_out.",
    rf"{HALF}middle\.0\.": r"\1coder.mid_block.resnets.0.",
    rf"{HALF}middle\.1\.": r"\1coder.mid_block.attentions.0.",
    rf"{HALF}middle\.2\.": r"\1coder.mid_block.resnets.1.",
    rf"{HALF}(down|up)samples\.(\d+)\.\2samples\.\d+\.(resample|time_conv)\.": r"\1coder.\2_blocks.\3.\2sampler.\4.",
    rf"{HALF}(down|up)samples\.(\d+)\.\2samples\.(\d+)\.": r"\1coder.\2_blocks.\3.resnets.\4.",
    r"\.residual\.0\.": ".norm1.",
    r"\.residual\.2\.": ".conv1.",
    r"\.residual\.3\.": ".norm2.",
    r"\.residual\.6\.": ".conv2.",
    r"\.shortcut\.": ".conv_shortcut.",
}
"""Stages within stages (Wan 2.2, Cosmos 3; Qwen-Image 2.1)."""
LEVELS = {
    rf"{HALF}(down|up)\.(\d+)\.block\.": r"\1coder.\2_blocks.\3.resnets.",
    rf"{HALF}(down|up)\.(\d+)\.\2sample\.": r"\1coder.\2_blocks.\3.\2samplers.0.",
    rf"{HALF}mid\.block_1\.": r"\1coder.mid_block.resnets.0.",
    rf"{HALF}mid\.block_2\.": r"\1coder.mid_block.resnets.1.",
    rf"{HALF}mid\.attn_1\.([qkv])\.": r"\1coder.mid_block.attentions.0.to_\2.",
    rf"{HALF}mid\.attn_1\.": r"\1coder.mid_block.attentions.0.",
    r"\.nin_shortcut\.": ".conv_shortcut.",
}
"""Levels of both halves in the order of their execution (HunyuanVideo 1.5), not as CompVis counts them."""
TRANSFORMER = {
    **LEVELS,
    r"^decoder\.x_embedder\.": "decoder.proj_in.",
    r"\.attn\.to_out\.": ".attn.to_out.0.",
    r"\.ff\.w1\.": ".ff.net.0.proj.",
    r"\.ff\.w2\.": ".ff.net.2.",
}
"""A transformer as decoder (MiniMax-H3)."""
LONG = {
    r"^vae\.": "",
    r"^encoder\.down_blocks\.8\.res_blocks\.": "encoder.mid_block.resnets.",
    r"^decoder\.up_blocks\.0\.res_blocks\.": "decoder.mid_block.resnets.",
    **{rf"\.down_blocks\.{2 * n}\.res_blocks\.": f".down_blocks.{n}.resnets." for n in range(4)},
    **{rf"\.down_blocks\.{2 * n + 1}\.conv\.": f".down_blocks.{n}.downsamplers.0.conv." for n in range(4)},
    **{rf"\.up_blocks\.{2 * n + 2}\.res_blocks\.": f".up_blocks.{n}.resnets." for n in range(4)},
    **{rf"\.up_blocks\.{2 * n + 1}\.conv\.": f".up_blocks.{n}.upsamplers.0.conv." for n in range(4)},
    r"^per_channel_statistics\.mean-of-means$": "latents_mean",
    r"^per_channel_statistics\.std-of-means$": "latents_std",
}
"""Blocks and the layers between them counted together (LTX-2.3); diffusers translates decoders with fewer of them."""
LAYOUTS = {
    rf"{HALF}(down|up)samples\.\d+\.\2samples\.": NESTED,
    rf"{HALF}(down|up)\.\d+\.block\.\d+\.norm1\.gamma$": LEVELS,
    r"^decoder\.transformer_blocks\.\d+\.attn\.to_qkv\.": TRANSFORMER,
    r"^(?:vae\.)?decoder\.up_blocks\.[78]\.": LONG,
}
"""Own parts of names by patterns, applied in order. Keyed by a pattern of names that no other layout here has."""
JOINED, GATED = ".attn.to_qkv.", ".ff.w1."
"""Layers with queries, keys and values, head by head; with the gate before the values, which diffusers has after."""
NUM_HEADS = "decoder_num_attention_heads"


def layout_of(names: Iterable[str]) -> Mapping[str, str] | None:
    """Return the patterns of the layout that a file with ``names`` has; None for layouts that are not known here."""
    every = tuple(names)
    return next((own for sign, own in LAYOUTS.items() if any(re.search(sign, name) for name in every)), None)


def in_own_names(
    tensors: Mapping[str, Tensor], layout: Mapping[str, str], config: Mapping[str, Any], shapes: Mapping[str, Size]
) -> dict[str, Tensor]:
    """Return ``tensors`` of a ``layout`` by diffusers' names, which have these ``shapes`` in the model."""
    named: dict[str, Tensor] = {}
    for name, x in tensors.items():
        own = name
        for pattern, part in layout.items():
            own = re.sub(pattern, part, own)
        if layout is TRANSFORMER and JOINED in name:
            three = x.reshape(config[NUM_HEADS], 3, -1, *x.shape[1:]).unbind(1)
            named |= {own.replace("to_qkv", f"to_{one}"): y.flatten(0, 1) for one, y in zip("qkv", three, strict=True)}
        else:
            named[own] = x.roll(len(x) // 2, 0) if layout is TRANSFORMER and GATED in name else x
    return {name: x.squeeze(2) if _is_of_one_frame(x, shapes.get(name)) else x for name, x in named.items()}


def _is_of_one_frame(x: Tensor, shape: Size | None) -> bool:
    """Return whether ``x`` convolves clips frame by frame, and the model of that ``shape`` has pictures instead."""
    return shape is not None and x.ndim == 5 and len(shape) == 4 and x.shape[2] == 1
