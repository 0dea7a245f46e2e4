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

from engines.fast.records import Edges, FrameProducts, Pairs


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
    x: Tensor | FrameProducts,
    weight_C: Tensor | None,
    earlier_BFPQC: Tensor | None,
    *,
    bias_C: Tensor | None = None,
    pairs: Pairs | None = None,
    eps: float = 0.0,
    edges: Edges = None,
) -> tuple[Tensor, Tensor]:
    """Return the inputs of the four products, (4, N, P, Q, C), and the last two frames that they were made of.

    They are made of the RMS norm of ``x + bias`` with SiLU, or of ``x + bias`` if ``weight`` is None. ``eps`` is added
    to the mean square. ``edges`` puts a pixel around each frame: P and Q are H + 2 and W + 2. ``earlier`` are one or
    two such frames before ``x``; those before it are zeros. None: they are those of ``x`` before the first of
    ``pairs``, which are all by default. Products make an even number of frames, and have earlier ones.
    """
    first = x if isinstance(x, Tensor) else x[0]
    if first.is_cuda:
        from engines.fast.triton_frames import launch_split

        with torch.cuda.device(first.device):
            return launch_split(x, weight_C, bias_C, earlier_BFPQC, pairs=pairs, eps=eps, edges=edges)
    x_BFHWC = x if isinstance(x, Tensor) else _frames(x, len(x[0]) if earlier_BFPQC is None else len(earlier_BFPQC))
    num_frames = x_BFHWC.shape[1]
    pairs = Pairs(number=num_frames // 2) if pairs is None else pairs
    x_BFHWC = x_BFHWC.float() if bias_C is None else x_BFHWC.float() + bias_C.float()
    x_BFHWC = x_BFHWC if weight_C is None else _normed(x_BFHWC, weight_C, None, eps=eps, silu=True)
    x_BFPQC = _with_edges(x_BFHWC, edges)
    if earlier_BFPQC is None:
        earlier_BFPQC = x_BFPQC[:, [max(0, pairs.start + offset) for offset in (-2, -1)]]
    zeros_BFPQC = torch.zeros_like(x_BFPQC[:, :1].expand(-1, 2 - earlier_BFPQC.shape[1], -1, -1, -1))
    places = [min(pairs.start + number, num_frames - 1) for number in range(2 * pairs.number)]
    all_BFPQC = torch.cat([zeros_BFPQC, earlier_BFPQC.float(), x_BFPQC[:, places]], 1)
    a, b, c, d = (all_BFPQC[:, start : all_BFPQC.shape[1] - 3 + start : 2].flatten(0, 1) for start in range(4))
    num_new = min(2 * pairs.number, max(num_frames - pairs.start, 2 * pairs.number - 1))
    last_BFPQC = all_BFPQC[:, num_new : num_new + 2]
    return torch.stack([a - c, b + c, c - b, b - d]).to(first.dtype), last_BFPQC.to(first.dtype)


def split_weights(weight_OIKHW: Tensor) -> Tensor:
    """Return the weights of the four products, (4, O, I, H, W), from those of a convolution of three frames (K)."""
    first, second, third = weight_OIKHW.float().unbind(2)
    half, both = second / 2, (first + third) / 2
    return torch.stack([first, both + half, both - half, third]).to(weight_OIKHW.dtype)


def merge_frames(products: FrameProducts, bias_C: Tensor, residual_BFHWC: Tensor) -> Tensor:
    """Return the frames of ``products`` plus ``bias`` and ``residual``."""
    out_BFHWC = torch.empty_like(residual_BFHWC)
    merge_into(out_BFHWC, products, bias_C, residual_BFHWC)
    return out_BFHWC


def merge_into(
    out_BFHWC: Tensor, products: FrameProducts, bias_C: Tensor, residual_BFHWC: Tensor | None, start: int = 0
) -> None:
    """Write the frames of ``products`` plus ``bias`` and ``residual`` to ``out``, from its frame ``start`` on.

    ``residual`` has the shape of ``out``, or is None. A last frame for which there is no place is left out.
    """
    if out_BFHWC.is_cuda:
        from engines.fast.triton_frames import launch_merge

        with torch.cuda.device(out_BFHWC.device):
            launch_merge(products, bias_C, residual_BFHWC, out_BFHWC, start)
        return
    target_BFHWC = out_BFHWC[:, start : start + 2 * len(products[0]) // len(out_BFHWC)]
    stop = start + target_BFHWC.shape[1]
    frames_BFHWC = _frames(products, len(out_BFHWC))[:, : stop - start] + bias_C.float()
    target_BFHWC.copy_(frames_BFHWC if residual_BFHWC is None else frames_BFHWC + residual_BFHWC[:, start:stop].float())


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


def _normed(x_BFHWC: Tensor, weight_C: Tensor, bias_C: Tensor | None, *, eps: float = 0.0, silu: bool) -> Tensor:
    x_BFHWC = x_BFHWC.float() if bias_C is None else x_BFHWC.float() + bias_C.float()
    channels = x_BFHWC.shape[-1]
    norm_BFHW1 = (x_BFHWC.square().sum(-1, keepdim=True) + eps * channels).sqrt().clamp(min=1e-12)
    normed_BFHWC = x_BFHWC / norm_BFHW1 * channels**0.5 * weight_C.float()
    return functional.silu(normed_BFHWC) if silu else normed_BFHWC


def _with_edges(x_BFHWC: Tensor, edges: Edges) -> Tensor:
    if edges is None:
        return x_BFHWC
    x_NHWC = x_BFHWC.flatten(0, 1)
    padded_NPQC = functional.pad(x_NHWC.movedim(-1, 1), (1, 1, 1, 1), mode=edges).movedim(1, -1)
    return padded_NPQC.reshape(*x_BFHWC.shape[:2], *padded_NPQC.shape[1:])
