"""FlashAttention-3 on Hopper GPUs (Shah et al. 2024, arXiv:2407.08608), from the optional package fa3-fwd."""

from __future__ import annotations

import importlib
import logging
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from engines.core.attention import Kernel, Prefix
from engines.core.tensors import relative_difference

logger = logging.getLogger(__name__)

MODULE = "fa3_fwd_interface"
"""Module of fa3-fwd, which has the forward only, in bfloat16 and float8."""
HOPPER = (9, 0)
HEAD_DIMS = (64, 96, 128, 192, 256)
"""Head dims of FlashAttention-3; a package may be built with fewer."""
MIN_MASKED_KEYS = 1024
"""Fewest keys for a mask: below, sorting them costs more than it saves. H200, compiled, in microseconds: 59 to 53 at
1088 keys, 20 to 26 at 512, 642 to 410 at 4608."""
MAX_ERROR = 0.01
"""Largest relative difference from attention in float32. Probabilities and the answer are rounded to bfloat16, which
costs less than 0.004."""


def with_flash3(fallback: Kernel, reference: Kernel, device: torch.device | str = "cuda") -> Kernel:
    """Return a bfloat16 kernel: FlashAttention-3 where the package supports the call, else ``fallback``.

    ``fallback`` serves other head dims, prefixes, and masks of fewer than ``MIN_MASKED_KEYS`` keys. It is
    returned itself if the GPU is no Hopper or the package is missing. It also is, with a log line, if the package fails
    to load or its answers differ from those of ``reference`` in float32 on the CPU.

    The comparison calls no fallback: cuDNN would compile a kernel a head dim, 0.6 to 1.2 s each on a new node.
    """
    package = load_package(torch.device(device))
    if package is None:
        return fallback
    whole, masked = (_supported_dims(package, reference, device, is_masked) for is_masked in (False, True))
    if not whole:
        return fallback
    logger.info("attention uses FlashAttention-3 for head dims %s", ", ".join(map(str, sorted(whole))))

    def flash3(
        q_BLHD: Tensor,
        k_BMGD: Tensor,
        v_BMGD: Tensor,
        /,
        *,
        mask_BM: Tensor | None = None,
        prefix: Prefix | None = None,
    ) -> tuple[Tensor, Tensor]:
        few = mask_BM is not None and k_BMGD.shape[1] < MIN_MASKED_KEYS
        if few or prefix is not None or q_BLHD.shape[-1] not in (whole if mask_BM is None else masked):
            return fallback(q_BLHD, k_BMGD, v_BMGD, mask_BM=mask_BM, prefix=prefix)
        return _attend(package, q_BLHD, k_BMGD, v_BMGD, mask_BM=mask_BM)

    return flash3


def _attend(
    package: Any, q_BLHD: Tensor, k_BMGD: Tensor, v_BMGD: Tensor, *, mask_BM: Tensor | None
) -> tuple[Tensor, Tensor]:
    if mask_BM is None:
        return attend(package, q_BLHD, k_BMGD, v_BMGD)
    return attend(package, q_BLHD, *attended_first(k_BMGD, v_BMGD, mask_BM))


def attended_first(k_BMGD: Tensor, v_BMGD: Tensor, mask_BM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys and values with the attended ones in front, and how many these are: the package takes no mask."""
    order_BM, num_keys_B = attended_order(mask_BM)
    k_BMGD, v_BMGD = (x.take_along_dim(order_BM[..., None, None], 1) for x in (k_BMGD, v_BMGD))
    return k_BMGD, v_BMGD, num_keys_B


def attended_order(mask_BM: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places of all keys, the attended ones first, and how many these are (int32)."""
    return mask_BM.argsort(dim=1, descending=True, stable=True), mask_BM.sum(1, dtype=torch.int32)


def attend(
    package: Any, q_BLHD: Tensor, k_BMGD: Tensor, v_BMGD: Tensor, num_keys_B: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Attend with the package to the first ``num_keys_B`` keys (None: all). ``options`` are arguments of its own."""
    if num_keys_B is None:
        out_BLHD, lse_BHL = package.flash_attn_func(q_BLHD, k_BMGD, v_BMGD, return_attn_probs=True, **options)
        return out_BLHD, lse_BHL
    options |= {"num_splits": 1, "return_softmax_lse": True}
    out_BLHD, lse_BHL, *_ = package.flash_attn_with_kvcache(q_BLHD, k_BMGD, v_BMGD, cache_seqlens=num_keys_B, **options)
    return out_BLHD, lse_BHL.masked_fill(num_keys_B[:, None, None] == 0, -torch.inf)


def load_package(device: torch.device) -> Any:
    """Return the package, or None if it is missing or unusable."""
    if find_spec(MODULE) is None or (device.type == "cuda" and torch.cuda.get_device_capability(device) != HOPPER):
        return None
    try:
        return importlib.import_module(MODULE)
    except (ImportError, OSError) as error:  # a library for another PyTorch
        logger.warning("FlashAttention-3 is not used: it is installed but cannot be loaded: %s", error)
        return None


def trial_call(dim: int, device: torch.device | str, is_masked: bool) -> tuple[list[Tensor], Tensor | None, str]:
    """Return bfloat16 queries, keys and values with heads of ``dim``, a mask if it has one, and the call's name."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, rows, 2, dim, generator=generator).to(device, torch.bfloat16) for rows in (96, 160, 160)]
    mask_BM = (torch.arange(160, device=device) % 3 > 0)[None] if is_masked else None
    return inputs, mask_BM, f"heads of {dim}{' with a mask' if is_masked else ''}"


def _supported_dims(package: Any, reference: Kernel, device: torch.device | str, is_masked: bool) -> frozenset[int]:
    return frozenset(dim for dim in HEAD_DIMS if _agrees(package, reference, dim, device, is_masked))


def _agrees(package: Any, reference: Kernel, dim: int, device: torch.device | str, is_masked: bool) -> bool:
    """Return whether the package takes heads of this dim and agrees with the reference."""
    inputs, mask_BM, case = trial_call(dim, device, is_masked)
    try:
        result = _attend(package, *inputs, mask_BM=mask_BM)
    except RuntimeError as error:  # the package was built without this head dim
        logger.info("FlashAttention-3 is not used for %s: %s", case, error)
        return False
    mask_BM = None if mask_BM is None else mask_BM.cpu()
    exact = reference(*(x.cpu().float() for x in inputs), mask_BM=mask_BM)
    for name, x, expected in zip(("answer", "log-sum-exp"), result, exact, strict=True):
        difference = relative_difference(x.cpu(), expected)
        if not difference <= MAX_ERROR:
            logger.warning("FlashAttention-3 is not used for %s: %s has relative error %s", case, name, difference)
            return False
    return True
