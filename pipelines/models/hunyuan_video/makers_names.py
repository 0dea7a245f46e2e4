"""Names of layers in adapters for Tencent's own model (musubi-tuner) and for ComfyUI, which joins projections.

Diffusers has them in ``scripts/convert_hunyuan_video1_5_to_diffusers.py`` only.
"""

from __future__ import annotations

from pipelines.models.makers_layers import DOUBLE_BLOCKS, MakersLayers

REFINER = r"txt_in\.individual_token_refiner\.blocks\.(\d+)\."
OWN_REFINER = r"context_embedder.token_refiner.refiner_blocks.\1."
MAKERS_LAYERS: MakersLayers = {
    **DOUBLE_BLOCKS,
    rf"{REFINER}self_attn[._]qkv": tuple(f"{OWN_REFINER}attn.to_{one}" for one in "qkv"),
    rf"{REFINER}self_attn[._]proj": (f"{OWN_REFINER}attn.to_out.0",),
    rf"{REFINER}mlp\.(?:fc1|0)": (f"{OWN_REFINER}ff.net.0.proj",),
    rf"{REFINER}mlp\.(?:fc2|2)": (f"{OWN_REFINER}ff.net.2",),
}
