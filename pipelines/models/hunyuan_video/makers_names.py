"""Names of layers in adapters for Tencent's own model (musubi-tuner) and for ComfyUI, which joins projections.

Diffusers has them in ``scripts/convert_hunyuan_video1_5_to_diffusers.py`` only.
"""

from __future__ import annotations

from collections.abc import Mapping

BLOCK, OWN = r"double_blocks\.(\d+)\.", r"transformer_blocks.\1."
REFINER = r"txt_in\.individual_token_refiner\.blocks\.(\d+)\."
OWN_REFINER = r"context_embedder.token_refiner.refiner_blocks.\1."
PROJECTIONS = {
    "img_attn": tuple(f"{OWN}attn.to_{one}" for one in "qkv"),
    "txt_attn": tuple(f"{OWN}attn.add_{one}_proj" for one in "qkv"),
}
MAKERS_LAYERS: Mapping[str, tuple[str, ...]] = {
    **{f"{BLOCK}{name}[._]qkv": own for name, own in PROJECTIONS.items()},
    **{
        f"{BLOCK}{name}_{one}": (each,)
        for name, own in PROJECTIONS.items()
        for one, each in zip("qkv", own, strict=True)
    },
    rf"{BLOCK}img_attn[._]proj": (f"{OWN}attn.to_out.0",),
    rf"{BLOCK}txt_attn[._]proj": (f"{OWN}attn.to_add_out",),
    rf"{BLOCK}img_mlp\.(?:fc1|0)": (f"{OWN}ff.net.0.proj",),
    rf"{BLOCK}img_mlp\.(?:fc2|2)": (f"{OWN}ff.net.2",),
    rf"{BLOCK}txt_mlp\.(?:fc1|0)": (f"{OWN}ff_context.net.0.proj",),
    rf"{BLOCK}txt_mlp\.(?:fc2|2)": (f"{OWN}ff_context.net.2",),
    rf"{BLOCK}img_mod\.lin(?:ear)?": (f"{OWN}norm1.linear",),
    rf"{BLOCK}txt_mod\.lin(?:ear)?": (f"{OWN}norm1_context.linear",),
    rf"{REFINER}self_attn[._]qkv": tuple(f"{OWN_REFINER}attn.to_{one}" for one in "qkv"),
    rf"{REFINER}self_attn[._]proj": (f"{OWN_REFINER}attn.to_out.0",),
    rf"{REFINER}mlp\.(?:fc1|0)": (f"{OWN_REFINER}ff.net.0.proj",),
    rf"{REFINER}mlp\.(?:fc2|2)": (f"{OWN_REFINER}ff.net.2",),
}
"""Own names by regular expressions of the makers'; rows of several follow each other."""
