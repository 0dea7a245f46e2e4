"""Fused passes over a clip's feature maps: one pass over memory each, in Triton on CUDA, else in plain PyTorch.

Dims: B batch, F frames, H rows, W columns, C channels, N pairs of frames, or frames, of the whole batch. All are
contiguous, float32 inside. The plain version of each is its specification and the path on the CPU.

A causal convolution of three frames in time is computed for two frames at once by four products in place of six
(Winograd's F(2, 3), Lavin and Gray, 2016, https://arxiv.org/abs/1509.09308, section 4.1). Each product is a convolution
of single frames: ``split_frames`` makes their inputs, ``split_weights`` their weights, and ``merge_frames`` the two
frames.

A convolution of 3 x 3 pixels that follows an enlargement to twice the rows and columns reads at most 2 x 2 different
pixels: ``enlarged_weights`` are those of four small convolutions before the enlargement, and ``interleave`` makes the
large frames of their outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from engines.fast.records import FrameProducts


def pixel_norm(
    x_BFHWC: Tensor, weight_C: Tensor, out_BFHWC: Tensor, *, bias_C: Tensor | None = None, silu: bool
) -> None:
    """Write the RMS norm of each pixel's channels, scaled by ``weight``, to ``out``, whose entries are contiguous.

    ``bias`` is added to ``x`` before the norm. SiLU follows if ``silu``.
    """
    if x_BFHWC.is_cuda:
        from engines.fast.triton_frames import launch_norm

        with torch.cuda.device(x_BFHWC.device):  # Triton launches on the current device, the thread's own
            launch_norm(x_BFHWC, weight_C, bias_C, out_BFHWC, silu=silu)
        return
    out_BFHWC.copy_(_normed(x_BFHWC, weight_C, bias_C, silu=silu))


def add_residual(x_BFHWC: Tensor, bias_C: Tensor, residual_BFHWC: Tensor) -> Tensor:
    """Add ``bias`` and ``residual`` to ``x`` in place and return it."""
    if x_BFHWC.is_cuda:
        from engines.fast.triton_frames import launch_add

        with torch.cuda.device(x_BFHWC.device):
            launch_add(x_BFHWC, bias_C, residual_BFHWC)
        return x_BFHWC
    return x_BFHWC.copy_(x_BFHWC.float() + bias_C.float() + residual_BFHWC.float())


def split_frames(
    x: Tensor | FrameProducts, weight_C: Tensor, earlier_BFHWC: Tensor, *, bias_C: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the inputs of the four products, (4, N, H, W, C), and the last two frames that they were made of.

    They are made of the RMS norm of ``x + bias`` with SiLU. ``x`` has an even number of frames. ``earlier`` are one or
    two normed frames before them; those before it are zeros.
    """
    first = x if isinstance(x, Tensor) else x[0]
    if first.is_cuda:
        from engines.fast.triton_frames import launch_split

        with torch.cuda.device(first.device):
            return launch_split(x, weight_C, bias_C, earlier_BFHWC)
    x_BFHWC = x if isinstance(x, Tensor) else _frames(x, len(earlier_BFHWC))
    normed_BFHWC = _normed(x_BFHWC, weight_C, bias_C, silu=True)
    missing = 2 - earlier_BFHWC.shape[1]
    zeros_BFHWC = torch.zeros_like(normed_BFHWC[:, :missing])
    all_BFHWC = torch.cat([zeros_BFHWC, earlier_BFHWC.float(), normed_BFHWC], 1)
    a, b, c, d = (all_BFHWC[:, start : all_BFHWC.shape[1] - 3 + start : 2].flatten(0, 1) for start in range(4))
    dtype = earlier_BFHWC.dtype
    return torch.stack([a - c, b + c, c - b, b - d]).to(dtype), all_BFHWC[:, -2:].to(dtype)


def split_weights(weight_OIKHW: Tensor) -> Tensor:
    """Return the weights of the four products, (4, O, I, H, W), from those of a convolution of three frames (K)."""
    first, second, third = weight_OIKHW.float().unbind(2)
    half, both = second / 2, (first + third) / 2
    return torch.stack([first, both + half, both - half, third]).to(weight_OIKHW.dtype)


def merge_frames(products: FrameProducts, bias_C: Tensor, residual_BFHWC: Tensor) -> Tensor:
    """Return the frames of ``products`` plus ``bias`` and ``residual``."""
    if residual_BFHWC.is_cuda:
        from engines.fast.triton_frames import launch_merge

        with torch.cuda.device(residual_BFHWC.device):
            return launch_merge(products, bias_C, residual_BFHWC)
    frames_BFHWC = _frames(products, len(residual_BFHWC)) + bias_C.float() + residual_BFHWC.float()
    return frames_BFHWC.to(residual_BFHWC.dtype)


def enlarged_weights(weight_OIHW: Tensor) -> Tensor:
    """Return the weights (4 O, I, 2, 2) of convolutions whose outputs ``interleave`` takes, from those of 3 x 3 pixels.

    The first output is for even rows and columns, the second for even rows and odd columns.
    """
    above, middle, below = weight_OIHW.float().unbind(2)
    rows = (torch.stack([above, middle + below], 2), torch.stack([above + middle, below], 2))
    columns = [some_OIHW.unbind(3) for some_OIHW in rows]
    each = [
        torch.stack(pair, 3)
        for left, middle, right in columns
        for pair in ((left, middle + right), (left + middle, right))
    ]
    return torch.cat(each).to(weight_OIHW.dtype)


def interleave(parts_NHWE: Tensor, bias_C: Tensor) -> Tensor:
    """Return frames (N, 2 H - 2, 2 W - 2, C) plus ``bias``, from the outputs of four convolutions, side by side.

    These were padded by one pixel on each side.
    """
    if parts_NHWE.is_cuda:
        from engines.fast.triton_frames import launch_interleave

        with torch.cuda.device(parts_NHWE.device):
            return launch_interleave(parts_NHWE, bias_C)
    frames, height, width = (size - (dim > 0) for dim, size in enumerate(parts_NHWE.shape[:3]))
    out_NHWC = parts_NHWE.new_empty(frames, 2 * height, 2 * width, len(bias_C))
    for number, part_NHWC in enumerate(parts_NHWE.chunk(4, -1)):
        row, column = divmod(number, 2)
        part_NHWC = part_NHWC[:, row : row + height, column : column + width]
        out_NHWC[:, row::2, column::2] = part_NHWC.float() + bias_C.float()
    return out_NHWC


def _frames(products: FrameProducts, batch: int) -> Tensor:
    a, b, c, d = (product_NHWC.float() for product_NHWC in products)
    return torch.stack([a + b + c, b - c - d], 1).view(batch, -1, *a.shape[1:])


def _normed(x_BFHWC: Tensor, weight_C: Tensor, bias_C: Tensor | None, *, silu: bool) -> Tensor:
    x_BFHWC = x_BFHWC.float() if bias_C is None else x_BFHWC.float() + bias_C.float()
    normed_BFHWC = functional.normalize(x_BFHWC, dim=-1) * x_BFHWC.shape[-1] ** 0.5 * weight_C.float()
    return functional.silu(normed_BFHWC) if silu else normed_BFHWC
