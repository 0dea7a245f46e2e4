"""Layers of a picture's decoder, strip by strip, of rows that lie in bands on several devices.

A group norm's statistics are those of all rows; a convolution gets one row more on both sides, be it of another
device; attention sees all pixels. So the bands are the rows of the whole, up to rounding.

One thread issues the work of all devices, layer by layer: on GPUs a call returns long before its work is done, and
which rows are exchanged when is the same every time. What devices need of each other is sent before any of them begins
with the convolution that needs it. ``Tensor.to`` from GPU to GPU copies on the current stream of the source once both
current streams have come so far, and that of the target goes on after it: what is read is complete, and memory that is
written or freed afterwards is no longer in use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Bands = Sequence[Tensor]
"""A layer's rows from top to bottom: (batch, channels, rows, columns), each on a device of its own."""
Prepare = Callable[[Tensor], Tensor]
"""Takes each row by itself."""
Edges = tuple[Tensor | None, Tensor | None]
"""The row above a band and the one below it; None where the picture ends."""

WIDE_BYTES = 2**28
"""Of float32 that statistics are taken of at a time, if there is room: few calls, and a hundredth of a GPU's memory."""


def same(rows_BCHW: Tensor) -> Tensor:
    return rows_BCHW


def doubled(rows_BCHW: Tensor) -> Tensor:
    return F.interpolate(rows_BCHW, scale_factor=2.0, mode="nearest")


def resnet(resnets: Sequence[Any], bands: Bands, strip_bytes: int) -> list[Tensor]:
    """Returns what a residual block, of which each device has one of ``resnets``, makes of all rows."""
    act = resnets[0].nonlinearity
    prepares = normalized([one.norm1 for one in resnets], act, bands, strip_bytes)
    inner = convolved([one.conv1 for one in resnets], bands, prepares, strip_bytes)
    prepares = normalized([one.norm2 for one in resnets], act, inner, strip_bytes)
    outs = convolved([one.conv2 for one in resnets], inner, prepares, strip_bytes)
    del inner
    for one, x_BCHW, out_BCHW in zip(resnets, bands, outs, strict=True):
        for top, bottom in _strips(x_BCHW, strip_bytes):
            rows = x_BCHW[:, :, top:bottom]
            shortcut = rows if one.conv_shortcut is None else one.conv_shortcut(rows)
            out_BCHW[:, :, top:bottom].add_(shortcut).div_(one.output_scale_factor)
    return outs


def attended(attentions: Sequence[Any], bands: Bands, strip_bytes: int) -> list[Tensor]:
    """Returns what attention makes of all rows. Each device asks for its own pixels, and answers with those of all."""
    prepares = normalized([one.group_norm for one in attentions], same, bands, strip_bytes)
    own = [prepare(x_BCHW) for prepare, x_BCHW in zip(prepares, bands, strict=True)]
    everywhere = [torch.cat([rows.to(x_BCHW.device) for rows in own], 2) for x_BCHW in bands]
    return [_attended(*each) for each in zip(attentions, bands, own, everywhere, strict=True)]


def _attended(attention: Any, x_BCHW: Tensor, own_BCHW: Tensor, all_BCHW: Tensor) -> Tensor:
    own_BLC, all_BMC = (rows.flatten(2).transpose(1, 2) for rows in (own_BCHW, all_BCHW))
    calls = ((attention.to_q, own_BLC), (attention.to_k, all_BMC), (attention.to_v, all_BMC))
    q, k, v = (linear(x).unflatten(-1, (attention.heads, -1)).transpose(1, 2) for linear, x in calls)
    mixed_BLC = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    out_BCHW: Tensor = attention.to_out[0](mixed_BLC).transpose(1, 2).reshape(x_BCHW.shape)
    return x_BCHW.add(out_BCHW).div_(attention.rescale_output_factor)


def normalized(norms: Sequence[Any], act: Callable[[Tensor], Tensor], bands: Bands, strip_bytes: int) -> list[Prepare]:
    """Returns for each band ``act(norm(rows))`` of any of its rows, by the statistics of all bands in float32."""
    limit_bytes = min(strip_bytes, WIDE_BYTES)
    moments = [_moments(norm, x_BCHW, limit_bytes) for norm, x_BCHW in zip(norms, bands, strict=True)]
    together_2BG = moments[0][1:] if len(moments) == 1 else _together(moments)
    sent = [together_2BG.to(x_BCHW.device) for x_BCHW in bands]
    return [_normal(norm, act, *mean_and_variance) for norm, mean_and_variance in zip(norms, sent, strict=True)]


def _moments(norm: Any, x_BCHW: Tensor, limit_bytes: int) -> Tensor:
    """Of how many values each group is, their mean and variance: (3, batch, groups). Where dtypes are narrow, as many
    groups at a time as take ``limit_bytes`` in float32, and one at least."""
    batch, _, height, width = x_BCHW.shape
    x_BGCHW = x_BCHW.reshape(batch, norm.num_groups, -1, height, width)
    num_values = x_BGCHW[0, 0].numel()
    num_groups = max(1, limit_bytes // (batch * num_values * torch.float32.itemsize))
    parts = torch.split(x_BGCHW, num_groups, dim=1)
    moments = [torch.var_mean(groups.float(), dim=(2, 3, 4), correction=0) for groups in parts]
    variance_BG, mean_BG = (torch.cat(each, 1) for each in zip(*moments, strict=True))
    return torch.stack([torch.full_like(mean_BG, num_values), mean_BG, variance_BG])


def _together(moments: Sequence[Tensor]) -> Tensor:
    """Mean and variance of all bands, (2, batch, groups), on the first one's device. No squares of values are summed,
    whose differences would lose digits (Chan, Golub and LeVeque, 1983)."""
    home = moments[0].device
    count_NBG, mean_NBG, variance_NBG = torch.stack([moment_3BG.to(home) for moment_3BG in moments], 1)
    share_NBG = count_NBG / count_NBG.sum(0)
    mean_BG = (share_NBG * mean_NBG).sum(0)
    variance_BG = (share_NBG * (variance_NBG + (mean_NBG - mean_BG).square())).sum(0)
    return torch.stack([mean_BG, variance_BG])


def _normal(norm: Any, act: Callable[[Tensor], Tensor], mean_BG: Tensor, variance_BG: Tensor) -> Prepare:
    """With statistics that are known, a group norm is a batch norm whose channels are those of all of a batch."""
    batch, num_groups = mean_BG.shape
    mean_N, variance_N = (
        x.repeat_interleave(norm.num_channels // num_groups, 1).flatten() for x in (mean_BG, variance_BG)
    )
    weight_N, bias_N = (x.float().repeat(batch) for x in (norm.weight, norm.bias))

    def prepare(rows_BCHW: Tensor) -> Tensor:
        rows_1NHW = rows_BCHW.reshape(1, -1, *rows_BCHW.shape[2:])
        normal_1NHW = F.batch_norm(rows_1NHW, mean_N, variance_N, weight_N, bias_N, training=False, eps=norm.eps)
        return act(normal_1NHW.reshape(rows_BCHW.shape))

    return prepare


def convolved(
    convs: Sequence[nn.Conv2d], bands: Bands, prepares: Sequence[Prepare], strip_bytes: int, scale: int = 1
) -> list[Tensor]:
    """Returns ``conv(prepare(rows))`` of all rows; ``prepare`` makes ``scale`` of each."""
    edges = _edges(bands)
    return [_convolved(*each, strip_bytes, scale) for each in zip(convs, bands, edges, prepares, strict=True)]


def _edges(bands: Bands) -> list[Edges]:
    above = [None, *(x_BCHW[:, :, -1:] for x_BCHW in bands[:-1])]
    below = [*(x_BCHW[:, :, :1] for x_BCHW in bands[1:]), None]
    places = [x_BCHW.device for x_BCHW in bands]
    return [(_sent(up, place), _sent(down, place)) for up, down, place in zip(above, below, places, strict=True)]


def _sent(row_BCHW: Tensor | None, device: torch.device) -> Tensor | None:
    return None if row_BCHW is None else row_BCHW.to(device)


def _convolved(conv: nn.Conv2d, x_BCHW: Tensor, edges: Edges, prepare: Prepare, strip_bytes: int, scale: int) -> Tensor:
    assert (conv.kernel_size, conv.stride, conv.padding) == ((3, 3), (1, 1), (1, 1)), conv
    batch, channels, height, width = x_BCHW.shape
    nothing = x_BCHW.new_zeros(batch, channels, 1, scale * width)
    above, below = (nothing if row is None else prepare(row) for row in edges)

    def strip(top: int, bottom: int) -> Tensor:
        rows = prepare(x_BCHW[:, :, max(0, top - 1) : bottom + 1])
        first = above[:, :, -1:] if top == 0 else None
        last = below[:, :, :1] if bottom == height else None
        return F.conv2d(_framed(first, rows, last, scale - 1), conv.weight, conv.bias, padding=(0, 1))

    strips = list(_strips(x_BCHW, strip_bytes // scale**2))
    if len(strips) == 1:
        return strip(0, height)
    out = x_BCHW.new_empty(batch, conv.out_channels, scale * height, scale * width)
    for top, bottom in strips:
        out[:, :, scale * top : scale * bottom] = strip(top, bottom)
    return out


def _framed(first: Tensor | None, rows_BCHW: Tensor, last: Tensor | None, num_unused: int) -> Tensor:
    """Rows between the first and the last. One that is None is among ``rows`` itself, with ``num_unused`` beyond."""
    start, stop = (num_unused if edge is None else 0 for edge in (first, last))
    inner = rows_BCHW[:, :, start : rows_BCHW.shape[2] - stop]
    return torch.cat([rows for rows in (first, inner, last) if rows is not None], 2)


def _strips(x_BCHW: Tensor, strip_bytes: int) -> Iterator[tuple[int, int]]:
    """First and last row, the last excluded, of each strip."""
    batch, channels, height, width = x_BCHW.shape
    num_rows = max(1, strip_bytes // (batch * channels * width * torch.float32.itemsize))
    for top in range(0, height, num_rows):
        yield top, min(top + num_rows, height)
