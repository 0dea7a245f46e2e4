"""Names of layers in makers' own code that several families share, for adapters. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

MakersLayers = Mapping[str, tuple[str, ...]]
"""Own names by regular expressions of the makers'; rows of several follow each other."""
OWN = r"transformer_blocks.\1."
PICTURE = (
    tuple(f"{OWN}attn.to_{one}" for one in "qkv"),
    *((OWN + name,) for name in ("attn.to_out.0", "ff.net.0.proj", "ff.net.2", "norm1.linear")),
)
TEXT = (
    tuple(f"{OWN}attn.add_{one}_proj" for one in "qkv"),
    *(
        (OWN + name,)
        for name in ("attn.to_add_out", "ff_context.net.0.proj", "ff_context.net.2", "norm1_context.linear")
    ),
)
"""Layers of a block of two streams: queries, keys and values; projection; both of the MLP; modulation."""


def two_streams(block: str, picture: str, text: str, names: Sequence[str]) -> MakersLayers:
    """Return the layers of a block, where ``names`` are those of ``PICTURE`` and ``TEXT`` in each stream."""
    streams = ((picture, PICTURE), (text, TEXT))
    return {block + stream + name: own for stream, layers in streams for name, own in zip(names, layers, strict=True)}


BLOCK = r"double_blocks\.(\d+)\."
ENDS = (r"_attn[._]qkv", r"_attn[._]proj", r"_mlp\.(?:fc1|0)", r"_mlp\.(?:fc2|2)", r"_mod\.lin(?:ear)?")
DOUBLE_BLOCKS: MakersLayers = {
    **two_streams(BLOCK, "img", "txt", ENDS),
    **{f"{BLOCK}img_attn_{one}": (own,) for one, own in zip("qkv", PICTURE[0], strict=True)},
    **{f"{BLOCK}txt_attn_{one}": (own,) for one, own in zip("qkv", TEXT[0], strict=True)},
}
"""Blocks of two streams, as trainers and ComfyUI write them."""


LAST_LAYERS: MakersLayers = {
    r"final_layer\.linear": ("proj_out",),
    r"final_layer\.adaLN_modulation\.1": ("norm_out.linear",),
}


def embedder(theirs: str, own: str, layers: tuple[str, str] = ("in_layer", "out_layer")) -> MakersLayers:
    """Return the names of the two layers of an embedder; ``theirs`` and ``layers`` are regular expressions."""
    return {rf"{theirs}\.{name}": (f"time_text_embed.{own}.linear_{number}",) for number, name in enumerate(layers, 1)}
