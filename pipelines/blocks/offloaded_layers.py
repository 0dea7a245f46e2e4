"""Layers of text encoders in host memory: each is copied to the device one layer ahead of its forward.

Only embeddings, norms and two layers of each list are on the device. A prompt has the same bytes as without.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engines.parallel.offload import NUM_BUFFERS, BlockOffload

ENCODERS = "text_encoder"
"""Prefix of the names of a pipeline's text encoders."""
NOT_FOR_PROMPTS = ("vision", "visual", "multi_modal_projector", "lm_head")
"""Parts of the names of modules that a text prompt does not use."""


def text_encoders_of(pipeline: Any) -> dict[str, nn.Module]:
    """Return the text encoders of ``pipeline`` by name."""
    parts = {name: part for name, part in vars(pipeline).items() if name.startswith(ENCODERS)}
    return {name: part for name, part in parts.items() if isinstance(part, nn.Module)}


def layer_lists(encoder: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, ...]]]:
    """Yield the names and layers of the outermost lists of layers of one class that is larger than the buffers."""
    yield from _lists_in(encoder, "")


def _lists_in(module: nn.Module, prefix: str) -> Iterator[tuple[str, tuple[nn.Module, ...]]]:
    for name, child in module.named_children():
        layers = tuple(child.children()) if isinstance(child, nn.ModuleList) else ()
        if len(layers) > NUM_BUFFERS and len({*map(type, layers)}) == 1 and num_bytes(layers[0]):
            yield f"{prefix}{name}", layers
        else:
            yield from _lists_in(child, f"{prefix}{name}.")


def layer_weights(encoder: nn.Module) -> frozenset[str]:
    """Return the names of the parameters in the ``layer_lists`` of ``encoder``."""
    own = {id(each) for _, layers in layer_lists(encoder) for layer in layers for each in layer.parameters()}
    return frozenset(name for name, each in encoder.named_parameters() if id(each) in own)


def offload_layers(encoders: Iterable[nn.Module], device: torch.device) -> list[BlockOffload]:
    """Keep the layers of ``encoders`` in host memory. ValueError if none has a list of layers."""
    lists = [layers for encoder in encoders for _, layers in layer_lists(encoder)]
    if not lists:
        raise ValueError("the text encoders have no lists of layers: remove text_encoder.offloads_layers")
    return [BlockOffload(layers, device) for layers in lists]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerBytes:
    """Bytes of text encoders' layers, by use."""

    layers: int = 0
    """All layers, which can be in host memory."""
    buffers: int = 0
    """Device memory in which they take turns."""
    prompt: int = 0
    """Layers that a prompt without pictures is encoded with."""

    def __add__(self, other: LayerBytes) -> LayerBytes:
        return LayerBytes(
            layers=self.layers + other.layers, buffers=self.buffers + other.buffers, prompt=self.prompt + other.prompt
        )


NO_LAYERS = LayerBytes()


def layer_bytes(encoder: nn.Module) -> LayerBytes:
    """Count the layers of ``encoder``, whose weights may be on "meta"."""
    found = LayerBytes()
    for name, layers in layer_lists(encoder):
        sizes = [num_bytes(layer) for layer in layers]
        prompt = 0 if any(word in name for word in NOT_FOR_PROMPTS) else sum(sizes)
        found += LayerBytes(layers=sum(sizes), buffers=NUM_BUFFERS * max(sizes), prompt=prompt)
    return found


def num_bytes(module: nn.Module) -> int:
    return sum(weight.nbytes for weight in module.parameters())
