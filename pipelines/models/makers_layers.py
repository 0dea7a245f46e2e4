"""Names of layers in makers' own code that several families share, for adapters and whole files. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

MakersLayers = Mapping[str, tuple[str, ...]]
"""Own names by regular expressions of the makers'; rows of several follow each other."""
OWN = r"transformer_blocks.\1."
SCALE = "scale"
"""The makers' name of a norm's weight."""
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


OTHER_NAMES = {
    r"^img_emb\.emb_pos$": "condition_embedder.image_embedder.pos_embed",
    r"^(audio_)?prompt_adaln_single\.": r"\1prompt_adaln.",
}
"""Names that diffusers' translations lack, and those that they know.

Positions of first and last picture (Wan 2.1), modulation by prompts (LTX-2.3).
"""


def known_name(name: str) -> str:
    """Return the name that diffusers' translations know for a makers' ``name``."""
    for theirs, known in OTHER_NAMES.items():
        name = re.sub(theirs, known, name)
    return name


def translate_layers(
    weights: Mapping[str, Tensor], layers: MakersLayers, module: nn.Module
) -> Iterator[tuple[str, Tensor, str]]:
    """Yield weights of a maker's ``layers`` as (own name, value, makers' name).

    Joined layers are divided by the sizes that ``module`` has.
    """
    from torch import split

    parameters = dict(module.named_parameters())
    for key, value in weights.items():
        layer, _, end = key.rpartition(".")
        leaf = "weight" if end == SCALE else end
        matches = ((re.fullmatch(pattern, layer), names) for pattern, names in layers.items())
        own = next(([f"{match.expand(name)}.{leaf}" for name in names] for match, names in matches if match), [])
        sizes = [len(parameters[name]) for name in own if name in parameters]
        if own and len(sizes) == len(own) and value.shape[:1] == (sum(sizes),):
            for name, rows in zip(own, split(value, sizes), strict=True):
                yield name, rows.roll(len(rows) // 2, 0) if _has_scale_first(module, name) else rows, key


def _has_scale_first(module: nn.Module, parameter: str) -> bool:
    """Return whether a modulation has its scale before its shift, which makers have after it."""
    from diffusers.models.normalization import AdaLayerNormContinuous

    layer = parameter.rpartition(".")[0]
    return isinstance(module.get_submodule(layer.rpartition(".")[0]), AdaLayerNormContinuous)


def two_streams(block: str, picture: str, text: str, names: Sequence[str]) -> MakersLayers:
    """Return the layers of a block. ``names``, with ``{}`` for a stream's, are those of ``PICTURE`` and ``TEXT``."""
    return {
        block + name.format(stream): own
        for stream, layers in ((picture, PICTURE), (text, TEXT))
        for name, own in zip(names, layers, strict=True)
    }


BLOCK = r"double_blocks\.(\d+)\."
NAMES = (r"{}_attn[._]qkv", r"{}_attn[._]proj", r"{}_mlp\.(?:fc1|0)", r"{}_mlp\.(?:fc2|2)", r"{}_mod\.lin(?:ear)?")
DOUBLE_BLOCKS: MakersLayers = {
    **two_streams(BLOCK, "img", "txt", NAMES),
    **{f"{BLOCK}img_attn_{one}": (own,) for one, own in zip("qkv", PICTURE[0], strict=True)},
    **{f"{BLOCK}txt_attn_{one}": (own,) for one, own in zip("qkv", TEXT[0], strict=True)},
    **{
        rf"{BLOCK}{stream}_attn[._](?:norm\.)?{theirs}_norm": (f"{OWN}attn.norm_{added}{own}",)
        for stream, added in (("img", ""), ("txt", "added_"))
        for theirs, own in (("q(?:uery)?", "q"), ("k(?:ey)?", "k"))
    },
}
"""Blocks of two streams, as their makers, trainers and ComfyUI write them."""
LAST_LAYERS: MakersLayers = {
    r"final_layer\.linear": ("proj_out",),
    r"final_layer\.adaLN_modulation\.1": ("norm_out.linear",),
}


def embedder(
    theirs: str, own: str, layers: tuple[str, str] = ("in_layer", "out_layer"), inside: str = "time_text_embed."
) -> MakersLayers:
    """Return the names of the two layers of an embedder; ``theirs`` and ``layers`` are regular expressions."""
    return {rf"{theirs}\.{name}": (f"{inside}{own}.linear_{number}",) for number, name in enumerate(layers, 1)}
