"""Queries, keys and values of an attention in float8 (e4m3): by plain PyTorch, and by two Triton kernels on CUDA.

Dims: L queries, M keys, H heads of queries, G heads of keys, D head dim. The plain version is the specification. Keys
are smoothed: their mean over the tokens is subtracted. A scale per picture and key head is the largest power of 2 that
keeps all magnitudes within float8's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from engines.quantization.linear import FP8

MIN_AMAX = 2.0**-64
"""Tensors of zeros are scaled as if this were their largest value."""


class Fp8Inputs(NamedTuple):
    """Queries, keys and values in float8, and the factors that restore them, by picture and key head."""

    q_BLHD: Tensor
    k_BMGD: Tensor
    v_BMGD: Tensor
    q_descale_BG: Tensor
    k_descale_BG: Tensor
    v_descale_BG: Tensor
    lse_shift_BHL: Tensor
    """Score of each query with the keys' mean, which the log-sum-exp of smoothed keys lacks."""


def quantise_heads(
    q_BLHD: Tensor, k_BMGD: Tensor, v_BMGD: Tensor, mask_BM: Tensor | None = None, *, dim: int | None = None
) -> Fp8Inputs:
    """Return the inputs of an attention in float8, heads padded with zeros to ``dim``.

    Keys and values that ``mask_BM`` leaves out become 0.
    """
    head_dim = q_BLHD.shape[-1]
    padding = (0, (dim or head_dim) - head_dim)
    q_BLHD, k_BMGD, v_BMGD = (functional.pad(x.float(), padding) for x in (q_BLHD, k_BMGD, v_BMGD))
    if mask_BM is None:
        k_mean_BGD = k_BMGD.mean(1)
        k_BMGD = k_BMGD - k_mean_BGD[:, None]
    else:
        is_left_out = ~mask_BM[..., None, None]
        num_keys_B11 = mask_BM.sum(1).clamp(min=1)[:, None, None]
        k_mean_BGD = k_BMGD.masked_fill(is_left_out, 0.0).sum(1) / num_keys_B11
        k_BMGD = (k_BMGD - k_mean_BGD[:, None]).masked_fill(is_left_out, 0.0)
        v_BMGD = v_BMGD.masked_fill(is_left_out, 0.0)
    grouped_BLGHD = torch.unflatten(q_BLHD, 2, (k_BMGD.shape[2], -1))
    shift_BHL = torch.einsum("blghd,bgd->bghl", grouped_BLGHD, k_mean_BGD).flatten(1, 2) * float(head_dim**-0.5)
    q_BLGHD, q_descale_BG = _quantised(grouped_BLGHD)
    k_BMGD, k_descale_BG = _quantised(k_BMGD)
    v_BMGD, v_descale_BG = _quantised(v_BMGD)
    return Fp8Inputs(q_BLGHD.flatten(2, 3), k_BMGD, v_BMGD, q_descale_BG, k_descale_BG, v_descale_BG, shift_BHL)


def _quantised(x_BLG: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x`` (any dims after the key heads) in float8, and the factor per picture and key head."""
    amax_BG = x_BLG.abs().amax([1, *range(3, x_BLG.ndim)]).clamp(min=MIN_AMAX)
    scale_BG, descale_BG = _scales(amax_BG)
    scale = scale_BG.view(len(scale_BG), 1, -1, *[1] * (x_BLG.ndim - 3))
    return (x_BLG * scale).to(FP8), descale_BG


def _scales(amax: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest power of 2 that times ``amax`` is at most 448, and its inverse, from ``amax``'s bits.

    448 is 1.75 * 2**8. The sum carries into the exponent where the mantissa is above 1.75. Quotients and logarithms are
    rounded, on each device in another way. Infinity makes all values NaN, where the cast would make it 448.
    """
    exponent = (amax.view(torch.int32) + 0x1FFFFF) >> 23
    scale, descale = ((262 - exponent) << 23).view(torch.float32), ((exponent - 8) << 23).view(torch.float32)
    return scale.where(amax.isfinite(), torch.nan), descale


def fused_heads(
    q_BLHD: Tensor,
    k_BMGD: Tensor,
    v_BMGD: Tensor,
    order_BM: Tensor | None = None,
    num_keys_B: Tensor | None = None,
    *,
    dim: int | None = None,
) -> Fp8Inputs:
    """Return what ``quantise_heads`` does, on CUDA in two passes over q, k and v with any strides.

    With ``order_BM`` keys and values come in this order, and all after the first ``num_keys_B`` are 0. Queries, values
    and all factors have the plain version's bits. Keys may differ in the last bit: the mean adds up in another order.
    """
    return Fp8Inputs(*_run(q_BLHD, k_BMGD, v_BMGD, order_BM, num_keys_B, dim or q_BLHD.shape[-1]))


_Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@torch.library.custom_op("troupe::fp8_heads", mutates_args=())
def _run(
    q_BLHD: Tensor, k_BMGD: Tensor, v_BMGD: Tensor, order_BM: Tensor | None, num_keys_B: Tensor | None, dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from engines.fast.triton_fp8_heads import launch_heads

    out = _outputs(q_BLHD, k_BMGD, dim)
    with torch.cuda.device(q_BLHD.device):  # Triton launches on the current device, the thread's own
        launch_heads((q_BLHD, k_BMGD, v_BMGD), order_BM, num_keys_B, out, MIN_AMAX)
    return out


@_run.register_fake
def _(
    q_BLHD: Tensor, k_BMGD: Tensor, v_BMGD: Tensor, order_BM: Tensor | None, num_keys_B: Tensor | None, dim: int
) -> _Outputs:
    return _outputs(q_BLHD, k_BMGD, dim)


def _outputs(q_BLHD: Tensor, k_BMGD: Tensor, dim: int) -> _Outputs:
    """Return the fused version's memory, in the order of ``Fp8Inputs``."""
    (batch, length, heads, _), (_, num_keys, groups, _) = q_BLHD.shape, k_BMGD.shape
    keys = (batch, num_keys, groups, dim)
    q, k, v = (q_BLHD.new_empty(shape, dtype=FP8) for shape in ((batch, length, heads, dim), keys, keys))
    q_descale, k_descale, v_descale = (q_BLHD.new_empty((batch, groups), dtype=torch.float32) for _ in range(3))
    return q, k, v, q_descale, k_descale, v_descale, q_BLHD.new_empty((batch, heads, length), dtype=torch.float32)
