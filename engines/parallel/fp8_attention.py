"""Attention in float8 (e4m3): FlashAttention-3's forward on Hopper GPUs, and its reference on CPUs.

Keys are smoothed as in SageAttention 2 (arXiv:2411.10958): their mean over the tokens is subtracted. This does not
change the softmax, and its part of the log-sum-exp is added again. Queries, keys and values have one scale each per
picture and key head, since FlashAttention-3 (arXiv:2407.08608) takes no finer ones. Scales are powers of 2. They change
no mantissa, so a value rounds alike in every block, unless it is 2 ** 14 below the largest.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from engines.core.attention import Kernel, Prefix
from engines.core.tensors import relative_difference
from engines.parallel.flash3 import HEAD_DIMS, MIN_MASKED_KEYS, attend, attended_first, load_package, trial_call

logger = logging.getLogger(__name__)

E4M3 = torch.float8_e4m3fn
MAX_E4M3 = torch.finfo(E4M3).max
MIN_AMAX = 2.0**-64
"""Tensors of zeros are scaled as if this were their largest value."""
MAX_DIFFERENCE = 0.06
"""Largest relative difference between FlashAttention-3 and the reference. It rounds probabilities to float8 too, which
costs 0.03."""


class Fp8Inputs(NamedTuple):
    """Queries, keys and values in float8, and the factors that restore them, by picture and key head."""

    q_BLHD: Tensor
    k_BMGD: Tensor
    v_BMGD: Tensor
    q_descale_BG: Tensor
    k_descale_BG: Tensor
    v_descale_BG: Tensor
    k_mean_BGD: Tensor
    """Mean over the tokens, subtracted from the keys."""


def quantise_heads(q_BLHD: Tensor, k_BMGD: Tensor, v_BMGD: Tensor, mask_BM: Tensor | None = None) -> Fp8Inputs:
    """Return the inputs of an attention in float8. Keys and values that ``mask_BM`` leaves out become 0."""
    k_BMGD, v_BMGD = k_BMGD.float(), v_BMGD.float()
    if mask_BM is None:
        k_mean_BGD = k_BMGD.mean(1)
        k_BMGD = k_BMGD - k_mean_BGD[:, None]
    else:
        is_left_out = ~mask_BM[..., None, None]
        num_keys_B11 = mask_BM.sum(1).clamp(min=1)[:, None, None]
        k_mean_BGD = k_BMGD.masked_fill(is_left_out, 0.0).sum(1) / num_keys_B11
        k_BMGD = (k_BMGD - k_mean_BGD[:, None]).masked_fill(is_left_out, 0.0)
        v_BMGD = v_BMGD.masked_fill(is_left_out, 0.0)
    grouped_BLGHD = torch.unflatten(q_BLHD.float(), 2, (k_BMGD.shape[2], -1))
    q_BLGHD, q_descale_BG = _quantised(grouped_BLGHD)
    k_BMGD, k_descale_BG = _quantised(k_BMGD)
    v_BMGD, v_descale_BG = _quantised(v_BMGD)
    return Fp8Inputs(q_BLGHD.flatten(2, 3), k_BMGD, v_BMGD, q_descale_BG, k_descale_BG, v_descale_BG, k_mean_BGD)


def _quantised(x_BLG: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x`` (any dims after the key heads) in float8, and the factor per picture and key head."""
    others = [1, *range(3, x_BLG.ndim)]
    amax_BG = x_BLG.abs().amax(others).clamp(min=MIN_AMAX)
    scale_BG = (MAX_E4M3 / amax_BG).log2().floor().exp2()
    scale = scale_BG.view(len(scale_BG), 1, -1, *[1] * (x_BLG.ndim - 3))
    return (x_BLG * scale).to(E4M3), scale_BG.reciprocal()


def shift_of_lse(q_BLHD: Tensor, k_mean_BGD: Tensor) -> Tensor:
    """Return what smoothed keys lack in ``lse_BHL``: the score of each query with the keys' mean."""
    grouped_BLGHD = torch.unflatten(q_BLHD.float(), 2, (k_mean_BGD.shape[1], -1))
    scores_BHL: Tensor = torch.einsum("blghd,bgd->bghl", grouped_BLGHD, k_mean_BGD).flatten(1, 2)
    return scores_BHL * float(q_BLHD.shape[-1] ** -0.5)


def fp8_reference(exact: Kernel) -> Kernel:
    """Return attention of the quantised values by ``exact`` in float32, for CPUs and as a reference.

    Calls with a prefix are computed by ``exact`` as they are: FlashAttention-3 has none either.
    """

    def fp8(
        q_BLHD: Tensor,
        k_BMGD: Tensor,
        v_BMGD: Tensor,
        /,
        *,
        mask_BM: Tensor | None = None,
        prefix: Prefix | None = None,
    ) -> tuple[Tensor, Tensor]:
        if prefix is not None:
            return exact(q_BLHD, k_BMGD, v_BMGD, mask_BM=mask_BM, prefix=prefix)
        given = quantise_heads(q_BLHD, k_BMGD, v_BMGD, mask_BM)
        group = q_BLHD.shape[2] // k_BMGD.shape[2]
        q_descale_BH = given.q_descale_BG.repeat_interleave(group, dim=1)
        out_BLHD, lse_BHL = exact(
            given.q_BLHD.float() * q_descale_BH[:, None, :, None],
            given.k_BMGD.float() * given.k_descale_BG[:, None, :, None],
            given.v_BMGD.float() * given.v_descale_BG[:, None, :, None],
            mask_BM=mask_BM,
        )
        return out_BLHD.to(q_BLHD.dtype), lse_BHL + shift_of_lse(q_BLHD, given.k_mean_BGD)

    return fp8


def fp8_flash3(exact: Kernel, reference: Kernel, device: torch.device | str = "cuda") -> Kernel:
    """Return FlashAttention-3's attention in float8. ``ValueError`` if the GPU or the package has none.

    Head dims where it does not agree with ``reference`` are left out. ``exact`` serves prefixes, masks of fewer than
    ``MIN_MASKED_KEYS`` keys, and heads wider than all that are left. Others are padded to the next head dim.
    """
    package = load_package(torch.device(device))
    needs = "attention: fp8 needs a Hopper GPU (H100, H200) and the package fa3-fwd (pip install '.[flash3]')"
    if package is None:
        raise ValueError(f"{needs}; one of them is missing: leave attention out, which is auto")
    agrees = partial(_agrees, package, reference, device)
    whole, masked = (tuple(dim for dim in HEAD_DIMS if agrees(dim, is_masked)) for is_masked in (False, True))
    if not whole:
        raise ValueError(f"{needs}; this fa3-fwd computes no head dim in float8: leave attention out, which is auto")
    logger.info("attention in float8 uses FlashAttention-3 for head dims %s", ", ".join(map(str, whole)))

    def fp8(
        q_BLHD: Tensor,
        k_BMGD: Tensor,
        v_BMGD: Tensor,
        /,
        *,
        mask_BM: Tensor | None = None,
        prefix: Prefix | None = None,
    ) -> tuple[Tensor, Tensor]:
        few = mask_BM is not None and k_BMGD.shape[1] < MIN_MASKED_KEYS
        fitting = [dim for dim in (whole if mask_BM is None else masked) if dim >= q_BLHD.shape[-1]]
        if few or prefix is not None or not fitting:
            return exact(q_BLHD, k_BMGD, v_BMGD, mask_BM=mask_BM, prefix=prefix)
        return _attend_fp8(package, q_BLHD, k_BMGD, v_BMGD, mask_BM=mask_BM, dim=fitting[0])

    return fp8


def _attend_fp8(
    package: Any, q_BLHD: Tensor, k_BMGD: Tensor, v_BMGD: Tensor, *, mask_BM: Tensor | None, dim: int
) -> tuple[Tensor, Tensor]:
    """Attend with the package, heads padded to ``dim``. It returns bfloat16."""
    head_dim, num_keys_B = q_BLHD.shape[-1], None
    if mask_BM is not None:
        k_BMGD, v_BMGD, num_keys_B = attended_first(k_BMGD, v_BMGD, mask_BM)
        mask_BM = torch.arange(k_BMGD.shape[1], device=k_BMGD.device) < num_keys_B[:, None]
    pad = (0, dim - head_dim)
    q_padded, k_padded, v_padded = (functional.pad(x, pad) for x in (q_BLHD, k_BMGD, v_BMGD))
    given = quantise_heads(q_padded, k_padded, v_padded, mask_BM)
    out_BLHD, lse_BHL = attend(
        package, given.q_BLHD, given.k_BMGD, given.v_BMGD, num_keys_B,
        softmax_scale=head_dim**-0.5,  # of the heads as they were
        q_descale=given.q_descale_BG, k_descale=given.k_descale_BG, v_descale=given.v_descale_BG,
    )  # fmt: skip
    lse_BHL = lse_BHL + shift_of_lse(q_BLHD, given.k_mean_BGD[..., :head_dim])
    return out_BLHD[..., :head_dim].to(q_BLHD.dtype), lse_BHL


def _agrees(package: Any, reference: Kernel, device: torch.device | str, dim: int, is_masked: bool) -> bool:
    """Return whether the package takes heads of this dim in float8 and agrees with the reference."""
    inputs, mask_BM, case = trial_call(dim, device, is_masked)
    try:
        result = _attend_fp8(package, *inputs, mask_BM=mask_BM, dim=dim)
    except RuntimeError as error:  # the package was built without this head dim
        logger.info("attention in float8 is not used for %s: %s", case, error)
        return False
    expected = reference(*inputs, mask_BM=mask_BM)
    difference = max(map(relative_difference, result, expected))
    if not difference <= MAX_DIFFERENCE:
        logger.warning("attention in float8 is not used for %s: relative error %s", case, difference)
    return difference <= MAX_DIFFERENCE
