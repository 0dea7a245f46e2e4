"""The layers of a picture's decoder: which ones are supported, and how they compute strip by strip on several devices.

A group norm's statistics cover all rows. A convolution gets one more row on both sides, if need be from another device.
Attention sees all pixels. So the bands are the rows of the whole, up to rounding.

One thread issues the work of all devices, layer by layer: calls on GPUs return long before their work is done, and the
exchanges are the same every time. All edges are sent before any device starts the convolution that needs them.
``Tensor.to`` from GPU to GPU copies on the source's current stream, once both current streams have reached the call.
The target's stream continues after the copy. So the copied data is complete, and no memory in use is written or freed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from diffusers.models.autoencoders.vae import Decoder
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.unets.unet_2d_blocks import UNetMidBlock2D, UpDecoderBlock2D
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn
from torch.nn import functional as F

Bands = Sequence[Tensor]
"""A layer's rows from top to bottom: (batch, channels, rows, columns), each on a device of its own."""
RowFunction = Callable[[Tensor], Tensor]
"""A function of each row by itself."""
Edges = tuple[Tensor | None, Tensor | None]
"""The row above a band and the one below it; None where the picture ends."""

STATISTICS_BYTES = 2**28
"""Chunk size (bytes, float32) for the statistics of group norms: few calls, and about 1 % of a GPU's memory."""


def check_decoder(vae: Any, key: str) -> None:
    """Raise ValueError, which names the configuration's ``key``, if the decoder of ``vae`` is not supported."""
    if not is_supported_decoder(getattr(vae, "decoder", None)):
        raise ValueError(
            f"decoder.{key} is for auto-encoders of pictures with group norms, such as AutoencoderKL, and this model's "
            f"is {type(vae).__name__}: leave it out"
        )


def is_supported_decoder(decoder: Any) -> bool:
    """Return whether all layers after the middle block of ``decoder`` are supported."""
    blocks = list(decoder.up_blocks) if type(decoder) is Decoder else []
    resnets = [resnet for block in blocks for resnet in getattr(block, "resnets", ())]
    samplers = [sampler for block in blocks for sampler in getattr(block, "upsamplers", None) or ()]
    return (
        bool(blocks)
        and all(type(block) is UpDecoderBlock2D for block in blocks)
        and all(map(is_supported_resnet, resnets))
        and all(map(_is_supported_sampler, samplers))
        and isinstance(decoder.conv_norm_out, nn.GroupNorm)
    )


def is_supported_mid_block(middle: Any) -> bool:
    """Return whether the middle block of a decoder is supported as well."""
    return (
        type(middle) is UNetMidBlock2D
        and all(map(is_supported_resnet, middle.resnets))
        and all(attention is None or _is_supported_attention(attention) for attention in middle.attentions)
    )


def is_supported_resnet(resnet: Any) -> bool:
    plain = type(resnet) is ResnetBlock2D and resnet.time_emb_proj is None
    if not plain or resnet.upsample is not None or resnet.downsample is not None:
        return False
    return resnet.time_embedding_norm != "scale_shift" and all(
        isinstance(norm, nn.GroupNorm) for norm in (resnet.norm1, resnet.norm2)
    )


def _is_supported_sampler(sampler: Any) -> bool:
    plain = type(sampler) is Upsample2D and sampler.norm is None and sampler.interpolate and sampler.use_conv
    return plain and not sampler.use_conv_transpose and sampler.name == "conv"


def _is_supported_attention(attention: Any) -> bool:
    """Return whether it is plain self-attention of all pixels with a residual connection."""
    if type(attention) is not Attention or type(attention.processor) is not AttnProcessor2_0:
        return False
    others = (attention.spatial_norm, attention.norm_q, attention.norm_k, attention.norm_cross)
    is_plain = all(other is None for other in others) and not attention.is_causal
    return is_plain and attention.residual_connection and isinstance(attention.group_norm, nn.GroupNorm)


def identity(rows_BCHW: Tensor) -> Tensor:
    return rows_BCHW


def upsample(rows_BCHW: Tensor) -> Tensor:
    return F.interpolate(rows_BCHW, scale_factor=2.0, mode="nearest")


def apply_resnet(resnets: Sequence[Any], bands: Bands, strip_bytes: int) -> list[Tensor]:
    """Return a residual block's output for all rows. Each device has one of ``resnets``, which are alike."""
    act = resnets[0].nonlinearity
    norms = normalizers([one.norm1 for one in resnets], act, bands, strip_bytes)
    inner = convolve([one.conv1 for one in resnets], bands, norms, strip_bytes)
    norms = normalizers([one.norm2 for one in resnets], act, inner, strip_bytes)
    outs = convolve([one.conv2 for one in resnets], inner, norms, strip_bytes)
    del inner
    for one, x_BCHW, out_BCHW in zip(resnets, bands, outs, strict=True):
        for top, bottom in _strip_ranges(x_BCHW, strip_bytes):
            rows = x_BCHW[:, :, top:bottom]
            shortcut = rows if one.conv_shortcut is None else one.conv_shortcut(rows)
            out_BCHW[:, :, top:bottom].add_(shortcut).div_(one.output_scale_factor)
    return outs


def apply_attention(attentions: Sequence[Any], bands: Bands, strip_bytes: int) -> list[Tensor]:
    """Return attention's output for all rows. Each device has the queries of its band, and all keys and values."""
    norms = normalizers([one.group_norm for one in attentions], identity, bands, strip_bytes)
    own = [norm(x_BCHW) for norm, x_BCHW in zip(norms, bands, strict=True)]
    everywhere = [torch.cat([rows.to(x_BCHW.device) for rows in own], 2) for x_BCHW in bands]
    return [_attend(*each) for each in zip(attentions, bands, own, everywhere, strict=True)]


def _attend(attention: Any, x_BCHW: Tensor, own_BCHW: Tensor, all_BCHW: Tensor) -> Tensor:
    own_BLC, all_BMC = (rows.flatten(2).transpose(1, 2) for rows in (own_BCHW, all_BCHW))
    calls = ((attention.to_q, own_BLC), (attention.to_k, all_BMC), (attention.to_v, all_BMC))
    q, k, v = (linear(x).unflatten(-1, (attention.heads, -1)).transpose(1, 2) for linear, x in calls)
    mixed_BLC = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    out_BCHW: Tensor = attention.to_out[0](mixed_BLC).transpose(1, 2).reshape(x_BCHW.shape)
    return x_BCHW.add(out_BCHW).div_(attention.rescale_output_factor)


def normalizers(norms: Sequence[Any], act: RowFunction, bands: Bands, strip_bytes: int) -> list[RowFunction]:
    """Return for each band a function ``act(norm(rows))`` with the statistics of all bands, in float32."""
    limit_bytes = min(strip_bytes, STATISTICS_BYTES)
    moments = [_moments(norm, x_BCHW, limit_bytes) for norm, x_BCHW in zip(norms, bands, strict=True)]
    together_2BG = moments[0][1:] if len(moments) == 1 else _combine_moments(moments)
    copies = [together_2BG.to(x_BCHW.device) for x_BCHW in bands]
    return [_normalizer(norm, act, *mean_and_variance) for norm, mean_and_variance in zip(norms, copies, strict=True)]


def _moments(norm: Any, x_BCHW: Tensor, limit_bytes: int) -> Tensor:
    """Return the number of values in each group, their mean and their variance: (3, batch, groups).

    At a time, as many groups are read as take ``limit_bytes`` in float32, and at least one.
    """
    batch, _, height, width = x_BCHW.shape
    x_BGCHW = x_BCHW.reshape(batch, norm.num_groups, -1, height, width)
    num_values = x_BGCHW[0, 0].numel()
    num_groups = max(1, limit_bytes // (batch * num_values * torch.float32.itemsize))
    parts = torch.split(x_BGCHW, num_groups, dim=1)
    moments = [torch.var_mean(groups.float(), dim=(2, 3, 4), correction=0) for groups in parts]
    variance_BG, mean_BG = (torch.cat(each, 1) for each in zip(*moments, strict=True))
    return torch.stack([torch.full_like(mean_BG, num_values), mean_BG, variance_BG])


def _combine_moments(moments: Sequence[Tensor]) -> Tensor:
    """Return mean and variance of all bands, (2, batch, groups), on the first band's device.

    No squares of values are summed, since their differences would lose digits (Chan, Golub and LeVeque, 1983).
    """
    home = moments[0].device
    count_NBG, mean_NBG, variance_NBG = torch.stack([moment_3BG.to(home) for moment_3BG in moments], 1)
    share_NBG = count_NBG / count_NBG.sum(0)
    mean_BG = (share_NBG * mean_NBG).sum(0)
    variance_BG = (share_NBG * (variance_NBG + (mean_NBG - mean_BG).square())).sum(0)
    return torch.stack([mean_BG, variance_BG])


def _normalizer(norm: Any, act: RowFunction, mean_BG: Tensor, variance_BG: Tensor) -> RowFunction:
    """Return a group norm with given statistics: a batch norm over the channels of the whole batch."""
    batch, num_groups = mean_BG.shape
    mean_N, variance_N = (
        x.repeat_interleave(norm.num_channels // num_groups, 1).flatten() for x in (mean_BG, variance_BG)
    )
    weight_N, bias_N = (x.float().repeat(batch) for x in (norm.weight, norm.bias))

    def normalize(rows_BCHW: Tensor) -> Tensor:
        rows_1NHW = rows_BCHW.reshape(1, -1, *rows_BCHW.shape[2:])
        normal_1NHW = F.batch_norm(rows_1NHW, mean_N, variance_N, weight_N, bias_N, training=False, eps=norm.eps)
        return act(normal_1NHW.reshape(rows_BCHW.shape))

    return normalize


def convolve(
    convs: Sequence[nn.Conv2d], bands: Bands, befores: Sequence[RowFunction], strip_bytes: int, scale: int = 1
) -> list[Tensor]:
    """Return ``conv(before(rows))`` of all rows; ``before`` makes ``scale`` rows of each."""
    edges = _edges(bands)
    return [_convolve_band(*each, strip_bytes, scale) for each in zip(convs, bands, edges, befores, strict=True)]


def _edges(bands: Bands) -> list[Edges]:
    above = [None, *(x_BCHW[:, :, -1:] for x_BCHW in bands[:-1])]
    below = [*(x_BCHW[:, :, :1] for x_BCHW in bands[1:]), None]
    devices = [x_BCHW.device for x_BCHW in bands]
    return [(_copy_row(up, to), _copy_row(down, to)) for up, down, to in zip(above, below, devices, strict=True)]


def _copy_row(row_BCHW: Tensor | None, device: torch.device) -> Tensor | None:
    return None if row_BCHW is None else row_BCHW.to(device)


def _convolve_band(
    conv: nn.Conv2d, x_BCHW: Tensor, edges: Edges, before: RowFunction, strip_bytes: int, scale: int
) -> Tensor:
    assert (conv.kernel_size, conv.stride, conv.padding) == ((3, 3), (1, 1), (1, 1)), conv
    batch, channels, height, width = x_BCHW.shape
    nothing = x_BCHW.new_zeros(batch, channels, 1, scale * width)
    above, below = (nothing if row is None else before(row) for row in edges)

    def strip(top: int, bottom: int) -> Tensor:
        rows = before(x_BCHW[:, :, max(0, top - 1) : bottom + 1])
        first = above[:, :, -1:] if top == 0 else None
        last = below[:, :, :1] if bottom == height else None
        return F.conv2d(_with_edges(first, rows, last, scale - 1), conv.weight, conv.bias, padding=(0, 1))

    ranges = list(_strip_ranges(x_BCHW, strip_bytes // scale**2))
    if len(ranges) == 1:
        return strip(0, height)
    out = x_BCHW.new_empty(batch, conv.out_channels, scale * height, scale * width)
    for top, bottom in ranges:
        out[:, :, scale * top : scale * bottom] = strip(top, bottom)
    return out


def _with_edges(first: Tensor | None, rows_BCHW: Tensor, last: Tensor | None, num_unused: int) -> Tensor:
    """Return ``rows`` between the edges. Where an edge is None, ``rows`` has it, and ``num_unused`` rows beyond it."""
    start, stop = (num_unused if edge is None else 0 for edge in (first, last))
    inner = rows_BCHW[:, :, start : rows_BCHW.shape[2] - stop]
    return torch.cat([rows for rows in (first, inner, last) if rows is not None], 2)


def _strip_ranges(x_BCHW: Tensor, strip_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the first row of each strip, and the first row after it."""
    batch, channels, height, width = x_BCHW.shape
    num_rows = max(1, strip_bytes // (batch * channels * width * torch.float32.itemsize))
    for top in range(0, height, num_rows):
        yield top, min(top + num_rows, height)
