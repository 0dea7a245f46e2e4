"""The decoder of clips that sees all frames at once, with RMS norms and upsampling by channels, fused.

Its layers are replaced one by one, so tiles are decoded as before. An upsampling adds its own
input to its convolution, so the addition is part of the convolution's weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipelines.vae.frame_conv import (
    EDGES,
    FLOAT16_SCALE,
    ClipConv,
    ClipNorm,
    FrameConv,
    add_copy,
    are_layers,
    channels_first,
    channels_last,
    conv_of,
    is_layer,
    is_supported_conv,
    scale_layers,
    spread_to_pixels,
)

DECODER, RESNET, UPSAMPLER = "VideoDecoder3d", "ResnetBlock3d", "Upsampler3d"
LAYERS = (DECODER, RESNET, UPSAMPLER, "MidBlock3d", "UpBlock3d", "CausalConv3d", "RMSNorm")
"""Ends of the names of all classes of the library in a supported decoder."""


def is_supported_whole_decoder(decoder: Any) -> bool:
    """Return whether ``fuse_whole_decoder`` takes ``decoder``: it adds no noise and depends on no time."""
    if not is_layer(decoder, DECODER) or not are_layers(decoder, LAYERS):
        return False
    parts = list(decoder.modules())
    convs = [decoder.conv_in, decoder.conv_out, *(part.conv for part in parts if is_layer(part, UPSAMPLER))]
    return (
        decoder.time_embedder is None
        and isinstance(decoder.conv_act, nn.SiLU)
        and all(is_supported_conv(conv.conv) for conv in convs)
        and all(_is_supported_resnet(part) for part in parts if is_layer(part, RESNET))
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Whole:
    """Settings of all layers of a fused decoder."""

    dtype: torch.dtype
    """Dtype of the weights."""
    is_causal: bool
    """True if no frame depends on a later one."""
    scale: float
    """Factor of the sum that runs through all residual blocks."""

    def conv(self, part: Any, norm: ClipNorm | None = None, changed: nn.Conv3d | None = None) -> FrameConv:
        """Return the fused form of a layer with a convolution, or with a ``changed`` one in its place."""
        edges = EDGES[part.conv.padding_mode]
        return FrameConv(changed or part.conv, self.dtype, is_causal=self.is_causal, edges=edges, norm=norm)


def _is_supported_resnet(block: Any) -> bool:
    is_plain = block.per_channel_scale1 is None and block.scale_shift_table is None and not block.dropout.p
    are_convs = is_supported_conv(block.conv1.conv) and is_supported_conv(block.conv2.conv)
    return is_plain and are_convs and isinstance(block.nonlinearity, nn.SiLU)


@torch.no_grad()
def fuse_whole_decoder(decoder: Any, dtype: torch.dtype) -> None:
    """Change a supported ``decoder`` in place: layers are replaced, and the weights have ``dtype``."""
    own_dtype, scale = next(decoder.parameters()).dtype, FLOAT16_SCALE if dtype is torch.float16 else 1.0
    whole = Whole(dtype=dtype, is_causal=_is_causal(decoder), scale=scale)
    _scale_sum(decoder, scale)
    for name, part in list(decoder.named_modules()):
        if is_layer(part, RESNET):
            decoder.set_submodule(name, WholeResnet(part, whole))
        elif is_layer(part, UPSAMPLER):
            decoder.set_submodule(name, WholeUpsampler(part, whole))
    norm = _norm(decoder.norm_out, decoder.conv_out.conv.in_channels, scale)
    decoder.conv_in = ClipConv(whole.conv(decoder.conv_in), dtype)
    decoder.conv_out = ClipConv(whole.conv(decoder.conv_out, norm), own_dtype)
    decoder.norm_out, decoder.conv_act = nn.Identity(), nn.Identity()
    decoder.to(dtype)


def _is_causal(decoder: Any) -> bool:
    """Return whether no frame depends on a later one. It belongs to the decoder, or to each of its convolutions."""
    return bool(getattr(decoder, "is_causal", getattr(decoder.conv_in, "is_causal", False)))


def _scale_sum(decoder: Any, factor: float) -> None:
    """Scale the sum that runs through all residual blocks: what is added to it, and biases of what it goes through."""
    added, passed = [decoder.conv_in.conv], list[Any]()
    for part in decoder.modules():
        if is_layer(part, RESNET):
            added.append(part.conv2.conv)
            added += [] if part.conv_shortcut is None else [_inner_conv(part.conv_shortcut)]  # it reads a norm
        elif is_layer(part, UPSAMPLER):
            passed.append(part.conv.conv)
    scale_layers(added, passed, factor)


def _inner_conv(conv: Any) -> Any:
    return conv if isinstance(conv, nn.Conv3d) else conv.conv


def _norm(norm: Any, channels: int, scale: float) -> ClipNorm:
    """Return ``norm`` of values that are ``scale`` times as large."""
    weight_C = getattr(norm, "weight", None)
    return ClipNorm(weight_C=torch.ones(channels) if weight_C is None else weight_C.data, eps=norm.eps * scale**2)


class WholeResnet(nn.Module):
    """A residual block with the weights of ``block``."""

    def __init__(self, block: Any, whole: Whole) -> None:
        super().__init__()
        scale = whole.scale
        self.conv1 = whole.conv(block.conv1, _norm(block.norm1, block.conv1.conv.in_channels, scale))
        self.conv2 = whole.conv(block.conv2, _norm(block.norm2, block.conv2.conv.in_channels, 1.0))
        self.norm3 = block.norm3
        self.conv_shortcut = None if block.conv_shortcut is None else _inner_conv(block.conv_shortcut)
        if self.norm3 is not None:
            self.norm3.eps *= scale**2

    def forward(self, inputs: Tensor, temb: Any = None, generator: Any = None, causal: bool | None = None) -> Tensor:
        x_BFHWC = channels_last(inputs)
        inner_BFHWC = self.conv1(x_BFHWC)
        if self.norm3 is not None:
            x_BFHWC = self.norm3(x_BFHWC)
        if self.conv_shortcut is not None:
            x_BFHWC = functional.linear(x_BFHWC, self.conv_shortcut.weight.flatten(1), self.conv_shortcut.bias)
        return channels_first(self.conv2(inner_BFHWC, x_BFHWC))


class WholeUpsampler(nn.Module):
    """Further frames, rows and columns out of a convolution's channels, with the weights of ``block``."""

    def __init__(self, block: Any, whole: Whole) -> None:
        super().__init__()
        self.strides: tuple[int, int, int] = tuple(block.stride)
        size, conv = math.prod(self.strides), block.conv.conv
        weight_OIKHW = _pixels_first(conv.weight.data, size)
        if block.residual:
            channels, num_alike = len(weight_OIKHW) // size, conv.in_channels // size
            sources = torch.arange(channels) % num_alike * size + torch.arange(size)[:, None]
            weight_OIKHW = add_copy(weight_OIKHW, sources.flatten(), is_causal=whole.is_causal)
        self.conv = whole.conv(block.conv, changed=conv_of(weight_OIKHW, _pixels_first(conv.bias.data, size)))

    def forward(self, hidden_BCFHW: Tensor, causal: bool | None = None) -> Tensor:
        """Return the clip with its first frame once: those that an upsampling in time adds before it are left out."""
        frames_BFHWC = spread_to_pixels(self.conv(channels_last(hidden_BCFHW)), self.strides)
        return channels_first(frames_BFHWC[:, self.strides[0] - 1 :])


def _pixels_first(weight_O: Tensor, size: int) -> Tensor:
    """Return weights whose output channels are those of one pixel of a block after the other."""
    return weight_O.view(-1, size, *weight_O.shape[1:]).transpose(0, 1).flatten(0, 1)
