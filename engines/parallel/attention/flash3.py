"""FlashAttention-3 on Hopper GPUs (Shah et al. 2024, arXiv:2407.08608), of fa3-fwd where that is installed."""

from __future__ import annotations

import importlib
import logging
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from engines.core.differences import relative_difference
from engines.core.kernel import Kernel, Prefix

logger = logging.getLogger(__name__)

MODULE = "fa3_fwd_interface"
"""Of fa3-fwd: forward only, bfloat16 only."""
HOPPER = (9, 0)
HEAD_DIMS = (64, 96, 128, 192, 256)
"""Those that FlashAttention-3 knows; a package may be built with fewer."""
LARGEST_ERROR = 0.02
"""Between two kernels in bfloat16, relative."""


def with_flash3(otherwise: Kernel, device: torch.device | str = "cuda") -> Kernel:
    """Returns a kernel for bfloat16 that is FlashAttention-3 for heads that the package has, and ``otherwise`` for
    other heads and wherever there is a mask or a prefix.

    It is ``otherwise`` itself where the package is missing, cannot be loaded or gives other answers, which is logged,
    or the GPU is none that it was made for.
    """
    attend = _installed(torch.device(device))
    if attend is None:
        return otherwise
    dims = frozenset(dim for dim in HEAD_DIMS if _agrees(attend, otherwise, dim, device))
    if not dims:
        return otherwise
    logger.info("attention is FlashAttention-3 for heads of %s", ", ".join(map(str, sorted(dims))))

    def flash3(
        q_BLHD: Tensor,
        k_BMGD: Tensor,
        v_BMGD: Tensor,
        /,
        *,
        mask_BM: Tensor | None = None,
        prefix: Prefix | None = None,
    ) -> tuple[Tensor, Tensor]:
        if mask_BM is not None or prefix is not None or q_BLHD.shape[-1] not in dims:
            return otherwise(q_BLHD, k_BMGD, v_BMGD, mask_BM=mask_BM, prefix=prefix)
        out_BLHD, lse_BHL = attend(q_BLHD, k_BMGD, v_BMGD, return_attn_probs=True)
        return out_BLHD, lse_BHL

    return flash3


def _installed(device: torch.device) -> Any:
    """The package's function; None without it, or if it cannot be used."""
    if find_spec(MODULE) is None or (device.type == "cuda" and torch.cuda.get_device_capability(device) != HOPPER):
        return None
    try:
        return importlib.import_module(MODULE).flash_attn_func
    except (ImportError, OSError) as error:  # a library for another PyTorch
        logger.warning("FlashAttention-3 is installed but cannot be loaded, so it is not used: %s", error)
        return None


def _agrees(attend: Any, otherwise: Kernel, dim: int, device: torch.device | str) -> bool:
    """Whether the package takes heads of this dim and answers as the other kernel does."""
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(1, rows, 2, dim, generator=generator).to(device, torch.bfloat16) for rows in (96, 160, 160)]
    try:
        found = attend(*given, return_attn_probs=True)
    except RuntimeError as error:  # not among those that it was built for
        logger.info("FlashAttention-3 is not used for heads of %d: %s", dim, error)
        return False
    for name, mine, theirs in zip(("answer", "log-sum-exp"), found, otherwise(*given), strict=True):
        difference = relative_difference(mine, theirs)
        if not difference <= LARGEST_ERROR:
            logger.warning("FlashAttention-3's %s for heads of %d is wrong, it is not used: %s", name, dim, difference)
            return False
    return True
