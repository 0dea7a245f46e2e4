"""Attention on one device: the best fused kernel that also returns the log-sum-exp."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from engines.core.kernel import Kernel
from engines.core.layout import Rows

_aten = torch.ops.aten


def local_kernel(device: torch.device | str, dtype: torch.dtype) -> Kernel:
    """The kernel for a device type and dtype, chosen once.

    CPU: flash. CUDA in half precision: cuDNN, or FlashAttention-2 where cuDNN has no kernel; in float32: the
    memory-efficient kernel, the only fused one that takes it. Other devices: plain attention in float32.
    """
    return _kernel_for(torch.device(device).type, dtype)


@cache
def _kernel_for(device_type: str, dtype: torch.dtype) -> Kernel:
    if device_type == "cpu":
        return cpu_flash
    if device_type != "cuda":
        return plain_attention
    if dtype == torch.float32:
        return cuda_efficient
    return cudnn_flash if _cudnn_runs() else cuda_flash


def plain_attention(q_BLHD: Tensor, k_BMHD: Tensor, v_BMHD: Tensor, /) -> tuple[Tensor, Tensor]:
    """Attention written out in float32, for devices without a fused kernel (and as a reference in tests)."""
    q_BHLD, k_BHMD, v_BHMD = (x.transpose(1, 2).float() for x in (q_BLHD, k_BMHD, v_BMHD))
    scores_BHLM = (q_BHLD @ k_BHMD.mT) * q_BHLD.shape[-1] ** -0.5
    lse_BHL = scores_BHLM.logsumexp(-1)
    out_BHLD = (scores_BHLM - lse_BHL[..., None]).exp() @ v_BHMD
    return out_BHLD.transpose(1, 2).to(q_BLHD.dtype), lse_BHL


def cpu_flash(q_BLHD: Tensor, k_BMHD: Tensor, v_BMHD: Tensor, /) -> tuple[Tensor, Tensor]:
    """PyTorch's CPU flash attention; reads and writes the strided ``BLHD`` layout without copies."""
    out_BHLD, lse_BHL = _aten._scaled_dot_product_flash_attention_for_cpu(
        q_BLHD.transpose(1, 2), k_BMHD.transpose(1, 2), v_BMHD.transpose(1, 2)
    )
    return out_BHLD.transpose(1, 2), lse_BHL.float()


def cudnn_flash(q_BLHD: Tensor, k_BMHD: Tensor, v_BMHD: Tensor, /) -> tuple[Tensor, Tensor]:
    """cuDNN's fused attention (bf16 and fp16); its log-sum-exp comes with a trailing dim of 1 in some versions."""
    out_BHLD, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
        q_BLHD.transpose(1, 2), k_BMHD.transpose(1, 2), v_BMHD.transpose(1, 2), None, True
    )
    return out_BHLD.transpose(1, 2), lse.reshape(out_BHLD.shape[:3])


def cuda_flash(q_BLHD: Tensor, k_BMHD: Tensor, v_BMHD: Tensor, /) -> tuple[Tensor, Tensor]:
    """FlashAttention-2 as PyTorch ships it."""
    out_BHLD, lse_BHL, *_ = _aten._scaled_dot_product_flash_attention(
        q_BLHD.transpose(1, 2), k_BMHD.transpose(1, 2), v_BMHD.transpose(1, 2)
    )
    return out_BHLD.transpose(1, 2), lse_BHL


def cuda_efficient(q_BLHD: Tensor, k_BMHD: Tensor, v_BMHD: Tensor, /) -> tuple[Tensor, Tensor]:
    """Memory-efficient attention, in any floating dtype; its log-sum-exp is padded along the tokens."""
    out_BHLD, lse_BHL, *_ = _aten._scaled_dot_product_efficient_attention(
        q_BLHD.transpose(1, 2), k_BMHD.transpose(1, 2), v_BMHD.transpose(1, 2), None, True
    )
    return out_BHLD.transpose(1, 2), lse_BHL[..., : q_BLHD.shape[1]]


def crop_keys(kernel: Kernel, rows: Rows | None) -> Kernel:
    """``kernel`` on the given rows of keys and values only (all for None, then nothing is added)."""
    if rows is None:
        return kernel

    def cropped(q_BLHD: Tensor, k_BMHD: Tensor, v_BMHD: Tensor, /) -> tuple[Tensor, Tensor]:
        return kernel(q_BLHD, take_rows(k_BMHD, rows), take_rows(v_BMHD, rows))

    return cropped


def take_rows(x_BMHD: Tensor, rows: Rows) -> Tensor:
    pieces = [x_BMHD[:, start:stop] for start, stop in rows]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)


def _cudnn_runs() -> bool:
    """Whether cuDNN attention accepts a typical call; an old cuDNN or GPU says no when it is called."""
    q_BHLD = torch.zeros(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16)
    try:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            torch.nn.functional.scaled_dot_product_attention(q_BHLD, q_BHLD, q_BHLD)
    except RuntimeError:
        return False
    return True
