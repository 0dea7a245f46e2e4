"""Names of layers in makers' own code that several families share, for adapters. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping

MakersLayers = Mapping[str, tuple[str, ...]]
"""Own names by regular expressions of the makers'; rows of several follow each other."""
BLOCK, OWN = r"double_blocks\.(\d+)\.", r"transformer_blocks.\1."
PROJECTIONS = {
    "img_attn": tuple(f"{OWN}attn.to_{one}" for one in "qkv"),
    "txt_attn": tuple(f"{OWN}attn.add_{one}_proj" for one in "qkv"),
}
DOUBLE_BLOCKS: MakersLayers = {
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
}
"""Blocks of two streams, as trainers and ComfyUI write them."""


LAST_LAYERS: MakersLayers = {
    r"final_layer\.linear": ("proj_out",),
    r"final_layer\.adaLN_modulation\.1": ("norm_out.linear",),
}


def embedder(theirs: str, own: str, layers: tuple[str, str] = ("in_layer", "out_layer")) -> MakersLayers:
    """Return the names of the two layers of an embedder; ``theirs`` and ``layers`` are regular expressions."""
    return {rf"{theirs}\.{name}": (f"time_text_embed.{own}.linear_{number}",) for number, name in enumerate(layers, 1)}
