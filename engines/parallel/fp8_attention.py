"""Attention in float8 (e4m3): FlashAttention-3's forward on Hopper GPUs, and its reference on CPUs.

Keys are smoothed as in SageAttention 2 (arXiv:2411.10958): their mean over the tokens is subtracted. This does not
change the softmax, and its part of the log-sum-exp is added again. Queries, keys and values have one scale each per
picture and key head, since FlashAttention-3 (arXiv:2407.08608) takes no finer ones. Scales are powers of 2. They change
no mantissa, so a value rounds alike in every block, unless it is 2 ** 14 below the largest. ``engines.fast.fp8_heads``
computes all this.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engines.core.attention import Kernel, Prefix
from engines.core.tensors import relative_difference
from engines.fast.fp8_heads import Fp8Inputs, fused_heads, quantise_heads
from engines.parallel.flash3 import (
    HEAD_DIMS,
    MIN_MASKED_KEYS,
    attend,
    attended_first,
    attended_order,
    load_package,
    trial_call,
)

logger = logging.getLogger(__name__)

MAX_DIFFERENCE = 0.06
"""Largest relative difference between FlashAttention-3 and the reference. It rounds probabilities to float8 too, which
costs 0.03."""


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
        return out_BLHD.to(q_BLHD.dtype), lse_BHL + given.lse_shift_BHL

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
        prepare = _prepare_fused if q_BLHD.is_cuda else _prepare
        return _attend_fp8(package, q_BLHD, k_BMGD, v_BMGD, mask_BM=mask_BM, dim=fitting[0], prepare=prepare)

    return fp8


Prepare = Callable[[Tensor, Tensor, Tensor, Tensor | None, int], tuple[Fp8Inputs, Tensor | None]]
"""``(q, k, v, mask_BM, dim) -> (inputs, num_keys_B)``: heads padded to ``dim``, attended keys in front."""


def _attend_fp8(
    package: Any, q_BLHD: Tensor, k_BMGD: Tensor, v_BMGD: Tensor, *, mask_BM: Tensor | None, dim: int, prepare: Prepare
) -> tuple[Tensor, Tensor]:
    """Attend with the package, heads padded to ``dim``. It returns bfloat16."""
    head_dim = q_BLHD.shape[-1]
    given, num_keys_B = prepare(q_BLHD, k_BMGD, v_BMGD, mask_BM, dim)
    out_BLHD, lse_BHL = attend(
        package, given.q_BLHD, given.k_BMGD, given.v_BMGD, num_keys_B,
        softmax_scale=head_dim**-0.5,  # of the heads as they were
        q_descale=given.q_descale_BG, k_descale=given.k_descale_BG, v_descale=given.v_descale_BG,
    )  # fmt: skip
    return out_BLHD[..., :head_dim].to(q_BLHD.dtype), lse_BHL + given.lse_shift_BHL


def _prepare(
    q_BLHD: Tensor, k_BMGD: Tensor, v_BMGD: Tensor, mask_BM: Tensor | None, dim: int
) -> tuple[Fp8Inputs, Tensor | None]:
    num_keys_B = None
    if mask_BM is not None:
        k_BMGD, v_BMGD, num_keys_B = attended_first(k_BMGD, v_BMGD, mask_BM)
        mask_BM = torch.arange(k_BMGD.shape[1], device=k_BMGD.device) < num_keys_B[:, None]
    return quantise_heads(q_BLHD, k_BMGD, v_BMGD, mask_BM, dim=dim), num_keys_B


def _prepare_fused(
    q_BLHD: Tensor, k_BMGD: Tensor, v_BMGD: Tensor, mask_BM: Tensor | None, dim: int
) -> tuple[Fp8Inputs, Tensor | None]:
    order_BM, num_keys_B = (None, None) if mask_BM is None else attended_order(mask_BM)
    return fused_heads(q_BLHD, k_BMGD, v_BMGD, order_BM, num_keys_B, dim=dim), num_keys_B


def _agrees(package: Any, reference: Kernel, device: torch.device | str, dim: int, is_masked: bool) -> bool:
    """Return whether the package takes heads of this dim in float8 and agrees with the reference.

    Its inputs are the plain ones: a model uses one head dim or two, and Triton would compile kernels for all.
    """
    inputs, mask_BM, case = trial_call(dim, device, is_masked)
    try:
        result = _attend_fp8(package, *inputs, mask_BM=mask_BM, dim=dim, prepare=_prepare)
    except RuntimeError as error:  # the package was built without this head dim
        logger.info("attention in float8 is not used for %s: %s", case, error)
        return False
    expected = reference(*inputs, mask_BM=mask_BM)
    difference = max(map(relative_difference, result, expected))
    if not difference <= MAX_DIFFERENCE:
        logger.warning("attention in float8 is not used for %s: relative error %s", case, difference)
    return difference <= MAX_DIFFERENCE
