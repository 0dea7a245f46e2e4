"""The decoder of clips that repeats edges, goes latent frame by latent frame and attends to earlier ones, fused.

It replaces the library's, which decodes all frames at once. ``feat_cache`` and ``feat_idx`` are those of ``chunks``.
A convolution of the sum adds its own input, so the addition is part of the convolution's weights. A clip's first
frame is enlarged by weights of its own, and not in time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from engines.fast.frames import add_residual, pixel_norm
from engines.fast.records import Edges
from pipelines.vae.frame_conv import (
    FLOAT16_SCALE,
    ClipNorm,
    FrameConv,
    add_copy,
    are_layers,
    channels_first,
    channels_last,
    conv_of,
    convolve_frames,
    frozen,
    in_channels_last,
    is_layer,
    is_supported_conv,
    scale_layers,
    spread_to_pixels,
    with_bias,
    with_more_channels,
)

DECODER, RESNET, ATTENTION, UPSAMPLER = "Decoder3D", "ResnetBlock", "AttnBlock", "Upsample"
LAYERS = (DECODER, RESNET, ATTENTION, UPSAMPLER, "MidBlock", "UpBlock3D", "CausalConv3d", "RMS_norm")
"""Ends of the names of all classes of the library in a supported decoder."""
CONV = "CausalConv3d"
REPEATED: Edges = "replicate"
NUM_PIXELS = 4
"""Pixels that each pixel becomes."""
Cache = list[Any]


def is_supported_stream_decoder(decoder: Any) -> bool:
    """Return whether ``FrameStream`` takes the weights of ``decoder``."""
    if not is_layer(decoder, DECODER) or not are_layers(decoder, LAYERS):
        return False
    parts = list(decoder.modules())
    convs = [part for part in parts if is_layer(part, CONV)]
    acts = [decoder.conv_act, *(part.nonlinearity for part in parts if is_layer(part, RESNET))]
    return (
        hasattr(decoder, "repeat")
        and all(part.pad_mode == REPEATED and is_supported_conv(part.conv) for part in convs)
        and all(isinstance(act, nn.SiLU) for act in acts)
    )


class FrameStream(nn.Module):
    """A decoder with the weights of a supported ``decoder``, which it changes, in ``dtype``.

    It takes latents of any dtype and returns pixels in the dtype of ``decoder``.
    """

    @torch.no_grad()
    def __init__(self, decoder: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.own_dtype = dtype, next(decoder.parameters()).dtype
        first: Any = decoder.conv_in.conv
        first.weight.data = add_copy(
            first.weight.data, torch.arange(first.out_channels) // decoder.repeat, is_causal=True
        )
        _scale_sum(decoder, FLOAT16_SCALE if dtype is torch.float16 else 1.0)
        self.conv_in = _frame_conv(decoder.conv_in, dtype)
        self.layers = nn.ModuleList(_fused(layer, dtype) for layer in _layers(decoder))
        last: Any = decoder.conv_out.conv
        self.num_channels, decoder.conv_out.conv = last.out_channels, with_more_channels(last)
        self.conv_out = _frame_conv(decoder.conv_out, dtype, decoder.norm_out)
        self.to(dtype)

    def forward(
        self, latents_BCFHW: Tensor, feat_cache: Cache | None = None, feat_idx: list[int] | None = None
    ) -> Tensor:
        """Return the pixels of latent frames, with a cache those of the next one."""
        if feat_cache is None or feat_idx is None:
            cache: Cache = [None] * sum(1 for _ in self.modules())
            return torch.cat([self(one_BCFHW, cache, [0]) for one_BCFHW in torch.split(latents_BCFHW, 1, 2)], 2)
        x_BFHWC = self.conv_in(channels_last(latents_BCFHW.to(self.dtype)), None, feat_cache, feat_idx)
        for layer in self.layers:
            x_BFHWC = layer(x_BFHWC, feat_cache, feat_idx)
        pixels_BFHWC = self.conv_out(x_BFHWC, None, feat_cache, feat_idx)
        return channels_first(pixels_BFHWC[..., : self.num_channels].to(self.own_dtype))


def _layers(decoder: Any) -> list[Any]:
    """Return the layers between the first convolution and the last, in order."""
    middle = decoder.mid_block
    layers = [middle.resnets[0]]
    for attention, resnet in zip(middle.attentions, middle.resnets[1:], strict=True):
        layers += [resnet] if attention is None else [attention, resnet]
    for block in decoder.up_blocks:
        layers += [*block.resnets, *(block.upsamplers or ())]
    return layers


def _fused(part: Any, dtype: torch.dtype) -> nn.Module:
    if is_layer(part, ATTENTION):
        return StreamAttention(part)
    return StreamResnet(part, dtype) if is_layer(part, RESNET) else StreamUpsampler(part, dtype)


def _scale_sum(decoder: Any, factor: float) -> None:
    """Scale the sum that runs through all residual blocks: what is added to it, and biases of what it goes through."""
    added, passed = [decoder.conv_in.conv], list[Any]()
    for part in _layers(decoder):
        if is_layer(part, RESNET):
            added.append(part.conv2.conv)
            passed += [] if part.conv_shortcut is None else [part.conv_shortcut]
        elif is_layer(part, ATTENTION):
            added.append(part.proj_out)
        else:
            passed.append(part.conv.conv)
    scale_layers(added, passed, factor)


def _frame_conv(part: Any, dtype: torch.dtype, norm: Any = None) -> FrameConv:
    own = None if norm is None else ClipNorm(weight_C=norm.gamma.data.flatten())
    return FrameConv(part.conv, dtype, is_causal=True, edges=REPEATED, norm=own)


class StreamResnet(nn.Module):
    """A residual block with the weights of ``block``."""

    def __init__(self, block: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.conv1 = _frame_conv(block.conv1, dtype, block.norm1)
        self.conv2 = _frame_conv(block.conv2, dtype, block.norm2)
        self.conv_shortcut = block.conv_shortcut

    def forward(self, x_BFHWC: Tensor, feat_cache: Cache, feat_idx: list[int]) -> Tensor:
        inner_BFHWC = self.conv1(x_BFHWC, None, feat_cache, feat_idx)
        if self.conv_shortcut is not None:
            x_BFHWC = functional.linear(x_BFHWC, self.conv_shortcut.weight.flatten(1), self.conv_shortcut.bias)
        out_BFHWC: Tensor = self.conv2(inner_BFHWC, x_BFHWC, feat_cache, feat_idx)
        return out_BFHWC


class StreamAttention(nn.Module):
    """Attention of a frame's pixels to those of the frame and all earlier ones, with one head."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        convs = block.to_q, block.to_k, block.to_v
        self.weight = frozen(torch.cat([conv.weight.data.flatten(1) for conv in convs]))
        self.bias = frozen(torch.cat([conv.bias.data for conv in convs]))
        self.norm, self.proj_out = block.norm, block.proj_out

    def forward(self, x_BFHWC: Tensor, feat_cache: Cache, feat_idx: list[int]) -> Tensor:
        """Return the output for one frame."""
        assert x_BFHWC.shape[1] == 1, "frames attend one after the other"
        index = feat_idx[0]
        feat_idx[0] += 1
        normed_BFHWC = torch.empty_like(x_BFHWC)
        pixel_norm(x_BFHWC, self.norm.gamma.flatten(), normed_BFHWC, silu=False)
        q, k, v = functional.linear(normed_BFHWC.flatten(1, 3), self.weight, self.bias)[:, None].chunk(3, -1)
        if feat_cache[index] is not None:
            k, v = (torch.cat(both, 2) for both in zip(feat_cache[index], (k, v), strict=True))
        feat_cache[index] = k, v
        mixed_BLC = functional.scaled_dot_product_attention(q, k, v)[:, 0]
        out_BLC = functional.linear(mixed_BLC, self.proj_out.weight.flatten(1))
        return add_residual(out_BLC.view(x_BFHWC.shape), self.proj_out.bias, x_BFHWC)


class StreamUpsampler(FrameConv):
    """Twice the rows and columns, and in some blocks from the second frame on twice the frames."""

    def __init__(self, block: Any, dtype: torch.dtype) -> None:
        conv, num_frames = block.conv.conv, 2 if block.add_temporal_upsample else 1
        weight_OIKHW, channels = conv.weight.data, conv.out_channels // (NUM_PIXELS * num_frames)
        folded_OIKHW = add_copy(weight_OIKHW, torch.arange(conv.out_channels) // block.repeats, is_causal=True)
        super().__init__(conv_of(folded_OIKHW, conv.bias.data), dtype, is_causal=True, edges=REPEATED)
        self.channels, self.first_weight, self.first_bias = channels, None, None
        if num_frames == 2:  # of each pixel's channels for two frames, the clip's first frame has the first half
            places = (torch.arange(NUM_PIXELS)[:, None] * 2 * channels + torch.arange(channels)).flatten()
            sources = torch.arange(len(places)) // (block.repeats // 2)
            folded_OIKHW = add_copy(weight_OIKHW[places], sources, is_causal=True)
            self.first_weight = frozen(in_channels_last((folded_OIKHW.sum(2) / 2).to(dtype)))
            self.first_bias = frozen(conv.bias.data[places].to(dtype))

    def forward(self, x_BFHWC: Tensor, feat_cache: Any = None, feat_idx: Any = None) -> Tensor:  # type: ignore[override]
        frames_BFHWE = super().forward(x_BFHWC, None, feat_cache, feat_idx)
        num_frames = frames_BFHWE.shape[-1] // (NUM_PIXELS * self.channels)
        return spread_to_pixels(frames_BFHWE, (num_frames, 2, 2))

    def _single(self, input_NPQC: Tensor, residual_BFHWC: Tensor | None) -> Tensor:
        if self.first_weight is None or self.first_bias is None:
            return super()._single(input_NPQC, residual_BFHWC)
        product_NHWC = convolve_frames(input_NPQC, self.first_weight, self.padding)
        return with_bias(product_NHWC, self.first_bias, residual_BFHWC)
