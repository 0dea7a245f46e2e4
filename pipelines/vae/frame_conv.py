"""Convolutions of 3 x 3 x 3 over a clip's frames in channels-last memory, what they read made in one pass.

Frames before a clip's first are its copies, and for convolutions that see a later frame those after the last one, too.
Pairs of frames are four convolutions of single frames (``engines.fast.frames``), made for a few pairs at a time.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from engines.fast.frames import add_residual, merge_into, split_frames, split_weights
from engines.fast.records import Edges, FrameProducts, Pairs

LIBRARY = "diffusers."
CHANNEL_MULTIPLE = 8
"""Output channels for which convolutions in half precision have fast kernels."""
FLOAT16_SCALE = 2**-4
"""Factor of the sum that runs through all residual blocks in float16, whose largest value is 65504.

All that reads the sum is linear or divides by its norm, so that the pixels are the same.
"""
RUN_BYTES = 2**28
"""Memory of the products and their inputs that are made at a time, and at least those of a pair."""
EDGES: dict[str, Edges] = {"zeros": None, "replicate": "replicate", "reflect": "reflect"}
"""Edges by the padding mode of a convolution; its own padding is zeros."""


def is_layer(part: Any, name: str) -> bool:
    """Return whether the class of ``part`` is a family's copy of the library's layer ``name``."""
    return type(part).__module__.startswith(LIBRARY) and type(part).__name__.endswith(name)


def are_layers(decoder: nn.Module, names: tuple[str, ...]) -> bool:
    """Return whether all parts of ``decoder`` of the library are layers with ``names``."""
    parts = [part for part in decoder.modules() if type(part).__module__.startswith(LIBRARY)]
    return all(any(is_layer(part, name) for name in names) for part in parts)


def channels_last(x_BCFHW: Tensor) -> Tensor:
    """Return ``x_BFHWC``, contiguous; no copy of what is in channels-last memory."""
    return x_BCFHW.permute(0, 2, 3, 4, 1).contiguous()


def channels_first(x_BFHWC: Tensor) -> Tensor:
    """Return a view ``x_BCFHW``."""
    return x_BFHWC.permute(0, 4, 1, 2, 3)


def in_channels_last(weight: Tensor) -> Tensor:
    layout = torch.channels_last_3d if weight.ndim == 5 else torch.channels_last
    return weight.contiguous(memory_format=layout)


def without_weights(conv: Any) -> None:
    """Remove the weights of ``conv``, others of which are in use."""
    conv.register_parameter("weight", None)
    conv.register_parameter("bias", None)


def convolve_frames(x_NHWC: Tensor, weight_OIHW: Tensor, padding: tuple[int, ...]) -> Tensor:
    """Return frames convolved one by one, without a bias."""
    out_NCHW = functional.conv2d(x_NHWC.permute(0, 3, 1, 2), weight_OIHW, padding=padding)
    return out_NCHW.permute(0, 2, 3, 1).contiguous()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ClipNorm:
    """RMS norm of each pixel's channels, before SiLU and a convolution."""

    weight_C: Tensor
    """Its weights; ones if it has none."""
    eps: float = 0.0
    """Added to the mean square."""


class FrameConv(nn.Module):
    """A convolution with the weights of ``conv``, its bias, and before it ``norm`` with SiLU if there is one.

    It computes in ``dtype``. ``is_causal``: it reads two earlier frames, else the frame before and the frame after.
    """

    def __init__(
        self, conv: nn.Conv3d, dtype: torch.dtype, *, is_causal: bool, edges: Edges, norm: ClipNorm | None = None
    ) -> None:
        super().__init__()
        assert conv.bias is not None, "a convolution without bias"
        self.edges, self.start = edges, 0 if is_causal else 1
        self.padding = (0, 0) if edges else (1, 1)
        self.eps = 0.0 if norm is None else norm.eps
        self.weight = frozen(in_channels_last(split_weights(conv.weight.data.float()).flatten(0, 1).to(dtype)))
        self.bias = frozen(conv.bias.data.to(dtype))
        self.gain = None if norm is None else frozen(norm.weight_C.to(conv.weight.device, dtype))

    def forward(
        self,
        x_BFHWC: Tensor,
        residual_BFHWC: Tensor | None = None,
        feat_cache: list[Any] | None = None,
        feat_idx: list[int] | None = None,
    ) -> Tensor:
        """Return the frames convolved, plus ``residual``. The cache has the frames before ``x``, and gets its last."""
        earlier_BFPQC, index = None, 0
        if feat_cache is not None and feat_idx is not None:
            index = feat_idx[0]
            feat_idx[0] += 1
            earlier_BFPQC = feat_cache[index]
        if x_BFHWC.shape[1] == 1 and earlier_BFPQC is None:
            inputs_4NPQC, last_BFPQC = self._split(x_BFHWC, None, Pairs(number=1, start=self.start))
            out_BFHWC = self._single(inputs_4NPQC[1], residual_BFHWC)
        else:
            out_BFHWC, last_BFPQC = self._paired(x_BFHWC, residual_BFHWC, earlier_BFPQC)
        if feat_cache is not None:
            feat_cache[index] = last_BFPQC
        return out_BFHWC

    def _split(self, x_BFHWC: Tensor, earlier_BFPQC: Tensor | None, pairs: Pairs) -> tuple[Tensor, Tensor]:
        return split_frames(x_BFHWC, self.gain, earlier_BFPQC, pairs=pairs, eps=self.eps, edges=self.edges)

    def _single(self, input_NPQC: Tensor, residual_BFHWC: Tensor | None) -> Tensor:
        """Return a clip's only frame, from the second product's input. The others are zeros: all frames are alike."""
        return with_bias(self._convolve(input_NPQC, 1), self.bias, residual_BFHWC)

    def _paired(
        self, x_BFHWC: Tensor, residual_BFHWC: Tensor | None, earlier_BFPQC: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the frames convolved, and the last two of those that were."""
        num_frames = x_BFHWC.shape[1]
        out_BFHWC = x_BFHWC.new_empty(*x_BFHWC.shape[:-1], len(self.bias))
        num_pairs, last_BFPQC = -(-num_frames // 2), x_BFHWC
        each = min(num_pairs, self._pairs_at_a_time(x_BFHWC))
        for first in range(0, num_pairs, each):
            pairs = Pairs(number=min(each, num_pairs - first), start=self.start + 2 * first)
            inputs_4NPQC, last_BFPQC = self._split(x_BFHWC, None if first else earlier_BFPQC, pairs)
            products = self._products(inputs_4NPQC, has_odd=num_frames > 1)
            del inputs_4NPQC
            merge_into(out_BFHWC, products, self.bias, residual_BFHWC, 2 * first)
            del products
        return out_BFHWC, last_BFPQC

    def _products(self, inputs_4NPQC: Tensor, *, has_odd: bool) -> FrameProducts:
        a, b, c = (self._convolve(inputs_4NPQC[number], number) for number in range(3))
        return a, b, c, self._convolve(inputs_4NPQC[3], 3) if has_odd else c

    def _convolve(self, x_NPQC: Tensor, number: int) -> Tensor:
        return convolve_frames(x_NPQC, self.weight.chunk(4)[number], self.padding)

    def _pairs_at_a_time(self, x_BFHWC: Tensor) -> int:
        batch, _, height, width, channels = x_BFHWC.shape
        values = 4 * batch * (height + 2) * (width + 2) * (channels + len(self.bias))
        return max(1, RUN_BYTES // (values * x_BFHWC.element_size()))


class ClipConv(nn.Module):
    """A ``FrameConv`` from (B, C, F, H, W) to it, called like diffusers' own. Its output has ``dtype``.

    ValueError if frames are to depend on others than those that it was made for.
    """

    def __init__(self, conv: FrameConv, dtype: torch.dtype) -> None:
        super().__init__()
        self.conv, self.dtype = conv, dtype

    def forward(self, x_BCFHW: Tensor, causal: bool | None = None) -> Tensor:
        is_causal = self.conv.start == 0
        if causal not in (None, is_causal):
            raise ValueError(f"a prepared decoder has causal={is_causal}, and the call has {causal}: leave it out")
        return channels_first(self.conv(channels_last(x_BCFHW.to(self.conv.weight.dtype))).to(self.dtype))


def scale_layers(added: Collection[Any], passed: Collection[Any], factor: float) -> None:
    """Multiply what runs through ``passed``, and is the sum of the outputs of ``added``, by ``factor``, in place."""
    for weight in [conv.weight for conv in added] + [conv.bias for conv in (*added, *passed)]:
        weight.mul_(factor)


def frozen(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=False)


def with_bias(product_NHWC: Tensor, bias_C: Tensor, residual_BFHWC: Tensor | None) -> Tensor:
    """Return a clip's only frame, (B, 1, H, W, C), plus ``bias`` and ``residual``."""
    frame_BFHWC = product_NHWC[:, None]
    return frame_BFHWC + bias_C if residual_BFHWC is None else add_residual(frame_BFHWC, bias_C, residual_BFHWC)


def is_supported_conv(conv: Any) -> bool:
    """Return whether ``FrameConv`` takes the weights of ``conv``."""
    if not isinstance(conv, nn.Conv3d) or conv.bias is None or conv.padding_mode not in EDGES:
        return False
    return (conv.kernel_size, conv.stride, conv.dilation, conv.groups) == ((3,) * 3, (1,) * 3, (1,) * 3, 1)


def spread_to_pixels(x_BFHWE: Tensor, strides: tuple[int, int, int]) -> Tensor:
    """Return each pixel as a block of frames, rows and columns, whose channels lie one after the other in ``x``."""
    batch, frames, height, width = x_BFHWE.shape[:4]
    times, rows, columns = strides
    blocks = x_BFHWE.view(batch, frames, height, width, times, rows, columns, -1).permute(0, 1, 4, 2, 5, 3, 6, 7)
    return blocks.reshape(batch, frames * times, height * rows, width * columns, -1)


def add_copy(weight_OIKHW: Tensor, sources: Tensor, *, is_causal: bool) -> Tensor:
    """Return weights of a convolution that also adds to each output channel the input channel of ``sources``.

    They are float32: the sum has more digits than a weight in half precision.
    """
    outputs, frame = torch.arange(len(weight_OIKHW)), 2 if is_causal else 1
    added_OIKHW = weight_OIKHW.float().clone()
    added_OIKHW[outputs, sources, frame, 1, 1] += 1
    return added_OIKHW


def with_more_channels(conv: nn.Conv3d) -> nn.Conv3d:
    """Return ``conv`` with output channels, zeros, to a number for which half precision has fast kernels."""
    missing = -conv.out_channels % CHANNEL_MULTIPLE
    weight_OIKHW = functional.pad(conv.weight.data, (0,) * 8 + (0, missing))
    assert conv.bias is not None
    return conv_of(weight_OIKHW, functional.pad(conv.bias.data, (0, missing)))


def conv_of(weight_OIKHW: Tensor, bias_O: Tensor) -> nn.Conv3d:
    """Return a convolution of 3 x 3 x 3 with these weights."""
    with torch.device("meta"):
        conv = nn.Conv3d(weight_OIKHW.shape[1], len(weight_OIKHW), 3)
    conv.weight, conv.bias = frozen(weight_OIKHW), frozen(bias_O)
    return conv
