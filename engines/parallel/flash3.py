"""FlashAttention-3 on Hopper GPUs (Shah et al. 2024, arXiv:2407.08608), of fa3-fwd where that is installed."""

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
"""Of fa3-fwd: forward only, bfloat16 only."""
HOPPER = (9, 0)
HEAD_DIMS = (64, 96, 128, 192, 256)
"""Those that FlashAttention-3 knows; a package may be built with fewer."""
FEWEST_KEYS_MASKED = 1024
"""Below, putting the keys in order takes longer than another kernel's mask (H200, compiled: 59 to 53 microseconds at
1088 keys, 20 to 26 at 512; 642 to 410 at 4608).
"""
LARGEST_ERROR = 0.02
"""Between two kernels in bfloat16, relative."""


def with_flash3(otherwise: Kernel, device: torch.device | str = "cuda") -> Kernel:
    """Returns a kernel for bfloat16 that is FlashAttention-3 for heads that the package has, and ``otherwise`` for
    other heads and wherever there is a prefix, or a mask of few keys.

    It is ``otherwise`` itself where the package is missing, cannot be loaded or gives other answers, which is logged,
    or the GPU is none that it was made for.
    """
    package = _installed(torch.device(device))
    if package is None:
        return otherwise
    whole, masked = (_dims(package, otherwise, device, is_masked) for is_masked in (False, True))
    if not whole:
        return otherwise
    logger.info("attention is FlashAttention-3 for heads of %s", ", ".join(map(str, sorted(whole))))

    def flash3(
        q_BLHD: Tensor,
        k_BMGD: Tensor,
        v_BMGD: Tensor,
        /,
        *,
        mask_BM: Tensor | None = None,
        prefix: Prefix | None = None,
    ) -> tuple[Tensor, Tensor]:
        few = mask_BM is not None and k_BMGD.shape[1] < FEWEST_KEYS_MASKED
        if few or prefix is not None or q_BLHD.shape[-1] not in (whole if mask_BM is None else masked):
            return otherwise(q_BLHD, k_BMGD, v_BMGD, mask_BM=mask_BM, prefix=prefix)
        return _attend(package, q_BLHD, k_BMGD, v_BMGD, mask_BM=mask_BM)

    return flash3


def _attend(
    package: Any, q_BLHD: Tensor, k_BMGD: Tensor, v_BMGD: Tensor, *, mask_BM: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The package takes no mask, but a number of keys: those that are attended come first, in their order."""
    if mask_BM is None:
        out_BLHD, lse_BHL = package.flash_attn_func(q_BLHD, k_BMGD, v_BMGD, return_attn_probs=True)
        return out_BLHD, lse_BHL
    order_BM = mask_BM.argsort(dim=1, descending=True, stable=True)
    k_BMGD, v_BMGD = (x.take_along_dim(order_BM[..., None, None], 1) for x in (k_BMGD, v_BMGD))
    num_keys_B = mask_BM.sum(1, dtype=torch.int32)
    out_BLHD, lse_BHL, *_ = package.flash_attn_with_kvcache(
        q_BLHD, k_BMGD, v_BMGD, cache_seqlens=num_keys_B, num_splits=1, return_softmax_lse=True
    )
    return out_BLHD, lse_BHL.masked_fill(num_keys_B[:, None, None] == 0, -torch.inf)


def _installed(device: torch.device) -> Any:
    """The package; None without it, or if it cannot be used."""
    if find_spec(MODULE) is None or (device.type == "cuda" and torch.cuda.get_device_capability(device) != HOPPER):
        return None
    try:
        return importlib.import_module(MODULE)
    except (ImportError, OSError) as error:  # a library for another PyTorch
        logger.warning("FlashAttention-3 is installed but cannot be loaded, so it is not used: %s", error)
        return None


def _dims(package: Any, otherwise: Kernel, device: torch.device | str, is_masked: bool) -> frozenset[int]:
    return frozenset(dim for dim in HEAD_DIMS if _agrees(package, otherwise, dim, device, is_masked))


def _agrees(package: Any, otherwise: Kernel, dim: int, device: torch.device | str, is_masked: bool) -> bool:
    """Whether the package takes heads of this dim and answers as the other kernel does."""
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(1, rows, 2, dim, generator=generator).to(device, torch.bfloat16) for rows in (96, 160, 160)]
    mask_BM = (torch.arange(160, device=device) % 3 > 0)[None] if is_masked else None
    what = f"heads of {dim}{' with a mask' if is_masked else ''}"
    try:
        found = _attend(package, *given, mask_BM=mask_BM)
    except RuntimeError as error:  # not among those that it was built for
        logger.info("FlashAttention-3 is not used for %s: %s", what, error)
        return False
    for name, mine, theirs in zip(("answer", "log-sum-exp"), found, otherwise(*given, mask_BM=mask_BM), strict=True):
        difference = relative_difference(mine, theirs)
        if not difference <= LARGEST_ERROR:
            logger.warning("FlashAttention-3's %s for %s is wrong, it is not used: %s", name, what, difference)
            return False
    return True
