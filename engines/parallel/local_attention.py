"""Attention on one device: the best fused kernel that also returns the log-sum-exp."""

from __future__ import annotations

from functools import cache
from threading import Lock

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from engines.core.attention import Kernel, Prefix
from engines.core.layout import Rows
from engines.core.torch_private import cpu_attention, cudnn_attention, efficient_attention, flash_attention
from engines.parallel.flash3 import with_flash3
from engines.parallel.fp8_attention import fp8_flash3, fp8_reference

MASKED = -65504.0
"""Score bias of a masked key; float16 has no lower value. Its exponential is 0 beside any other. cuDNN returns NaN
for -inf where all keys are masked."""
HEAD_DIM_MULTIPLE = 8
"""Fused CUDA kernels refuse other head dims in half precision."""
_LOCK = Lock()
"""Held while a kernel is chosen, which loads libraries. Other threads wait, and get the same kernel."""


def local_kernel(device: torch.device | str, dtype: torch.dtype, attention: str = "auto") -> Kernel:
    """Return the cached kernel for a device type and dtype. All kernels take grouped key heads, a mask and a prefix.

    ``attention`` is one of ``engines.core.spec.ATTENTIONS``. ValueError if the device has no kernel in float8.

    CPU: flash. CUDA in half precision: cuDNN, or FlashAttention-2 where cuDNN has no kernel. CUDA in bfloat16:
    FlashAttention-3 if it is installed and works. CUDA in float32: the memory-efficient kernel, the only fused one.
    Other devices: plain attention in float32.
    """
    if attention == "fp8":
        return _fp8_kernel_for(torch.device(device).type, dtype)
    return _kernel_for(torch.device(device).type, dtype)


@cache
def _fp8_kernel_for(device_type: str, dtype: torch.dtype) -> Kernel:
    if device_type == "cpu":
        return fp8_reference(cpu_flash)
    if device_type != "cuda":
        raise ValueError(f"attention: fp8 needs a Hopper GPU or a CPU, not {device_type}: leave it out, which is auto")
    return fp8_flash3(_kernel_for(device_type, dtype), fp8_reference(plain_attention))


@cache
def _kernel_for(device_type: str, dtype: torch.dtype) -> Kernel:
    if device_type == "cpu":
        return cpu_flash
    if device_type != "cuda":
        return plain_attention
    if dtype == torch.float32:
        return cuda_efficient
    with _LOCK:
        return _half_precision_kernel(dtype)


@cache
def _half_precision_kernel(dtype: torch.dtype) -> Kernel:
    fused = cudnn_flash if _cudnn_runs() else cuda_flash
    return with_flash3(fused, plain_attention) if dtype == torch.bfloat16 else fused


def plain_attention(
    q_BLHD: Tensor, k_BMGD: Tensor, v_BMGD: Tensor, /, *, mask_BM: Tensor | None = None, prefix: Prefix | None = None
) -> tuple[Tensor, Tensor]:
    """Compute attention step by step in float32, for devices without a fused kernel and as a reference in tests."""
    several = (q_BLHD, *as_many_as(q_BLHD, k_BMGD, v_BMGD))
    q_BHLD, k_BHMD, v_BHMD = (x.transpose(1, 2).float() for x in several)
    scores_BHLM = (q_BHLD @ k_BHMD.mT) * q_BHLD.shape[-1] ** -0.5
    seen_BLM = _attended(mask_BM, prefix)
    if seen_BLM is not None:
        scores_BHLM = scores_BHLM.masked_fill(~seen_BLM[:, None], -torch.inf)
    lse_BHL = scores_BHLM.logsumexp(-1)
    base_BHL = lse_BHL if seen_BLM is None else finite(lse_BHL)
    out_BHLD = (scores_BHLM - base_BHL[..., None]).exp() @ v_BHMD
    return out_BHLD.transpose(1, 2).to(q_BLHD.dtype), lse_BHL


def cpu_flash(
    q_BLHD: Tensor, k_BMGD: Tensor, v_BMGD: Tensor, /, *, mask_BM: Tensor | None = None, prefix: Prefix | None = None
) -> tuple[Tensor, Tensor]:
    """Run PyTorch's CPU flash attention, which reads and writes the strided ``BLHD`` layout without copies."""
    seen_BLM = _attended(mask_BM, prefix)
    out_BHLD, lse_BHL = cpu_attention(*_heads_first(q_BLHD, k_BMGD, v_BMGD), attn_mask=_bias(seen_BLM, q_BLHD.dtype))
    return out_BHLD.transpose(1, 2), _mask_lse(lse_BHL.float(), seen_BLM)


def cudnn_flash(
    q_BLHD: Tensor, k_BMGD: Tensor, v_BMGD: Tensor, /, *, mask_BM: Tensor | None = None, prefix: Prefix | None = None
) -> tuple[Tensor, Tensor]:
    """Run cuDNN's fused attention (bf16 and fp16). Some versions add a trailing dim of 1 to the log-sum-exp.

    Plain attention serves head dims that it refuses (``HEAD_DIM_MULTIPLE``).
    """
    if q_BLHD.shape[-1] % HEAD_DIM_MULTIPLE:
        return plain_attention(q_BLHD, k_BMGD, v_BMGD, mask_BM=mask_BM, prefix=prefix)
    seen_BLM = _attended(mask_BM, prefix)
    out_BHLD, lse, *_ = cudnn_attention(*_heads_first(q_BLHD, k_BMGD, v_BMGD), _bias(seen_BLM, q_BLHD.dtype), True)
    return out_BHLD.transpose(1, 2), _mask_lse(lse.reshape(out_BHLD.shape[:3]), seen_BLM)


def cuda_flash(
    q_BLHD: Tensor, k_BMGD: Tensor, v_BMGD: Tensor, /, *, mask_BM: Tensor | None = None, prefix: Prefix | None = None
) -> tuple[Tensor, Tensor]:
    """Run PyTorch's FlashAttention-2, or ``cuda_efficient`` if there is a mask or a prefix.

    Plain attention serves head dims that both refuse (``HEAD_DIM_MULTIPLE``).
    """
    if q_BLHD.shape[-1] % HEAD_DIM_MULTIPLE:
        return plain_attention(q_BLHD, k_BMGD, v_BMGD, mask_BM=mask_BM, prefix=prefix)
    if mask_BM is not None or prefix is not None:
        return cuda_efficient(q_BLHD, k_BMGD, v_BMGD, mask_BM=mask_BM, prefix=prefix)
    out_BHLD, lse_BHL, *_ = flash_attention(*_heads_first(q_BLHD, k_BMGD, v_BMGD))
    return out_BHLD.transpose(1, 2), lse_BHL


def cuda_efficient(
    q_BLHD: Tensor, k_BMGD: Tensor, v_BMGD: Tensor, /, *, mask_BM: Tensor | None = None, prefix: Prefix | None = None
) -> tuple[Tensor, Tensor]:
    """Run memory-efficient attention, in any floating dtype. Its log-sum-exp is padded along the tokens.

    The kernel has no grouped heads, so key and value heads are repeated.
    """
    q_BHLD, k_BHMD, v_BHMD = _heads_first(q_BLHD, *as_many_as(q_BLHD, k_BMGD, v_BMGD))
    seen_BLM = _attended(mask_BM, prefix)
    bias = _bias(seen_BLM, q_BLHD.dtype)
    bias_BHLM = None if bias is None else bias.expand(*q_BHLD.shape[:3], -1)
    out_BHLD, lse_BHL, *_ = efficient_attention(q_BHLD, k_BHMD, v_BHMD, bias_BHLM, True)
    return out_BHLD.transpose(1, 2), _mask_lse(lse_BHL[..., : q_BLHD.shape[1]], seen_BLM)


def repeat_heads(x_BMGD: Tensor, times: int) -> Tensor:
    """Repeat every head ``times`` times, adjacent to each other, for grouped query heads."""
    if times == 1:
        return x_BMGD
    return x_BMGD[:, :, :, None].expand(-1, -1, -1, times, -1).flatten(2, 3)


def as_many_as(q_BLHD: Tensor, k_BMGD: Tensor, v_BMGD: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values with as many heads as the queries."""
    times = q_BLHD.shape[2] // k_BMGD.shape[2]
    return repeat_heads(k_BMGD, times), repeat_heads(v_BMGD, times)


def finite(lse_BHL: Tensor) -> Tensor:
    """Replace the -inf of queries without keys by 0: subtracting -inf from -inf would give NaN."""
    return lse_BHL.masked_fill(lse_BHL == -torch.inf, 0.0)


def crop_keys(kernel: Kernel, rows: Rows | None) -> Kernel:
    """Return ``kernel`` restricted to the given rows of keys, values, mask and places. None keeps all."""
    if rows is None:
        return kernel

    def cropped(
        q_BLHD: Tensor,
        k_BMGD: Tensor,
        v_BMGD: Tensor,
        /,
        *,
        mask_BM: Tensor | None = None,
        prefix: Prefix | None = None,
    ) -> tuple[Tensor, Tensor]:
        mask_BM = None if mask_BM is None else take_rows(mask_BM, rows)
        prefix = None if prefix is None else prefix._replace(place_M=take_rows(prefix.place_M[None], rows)[0])
        return kernel(q_BLHD, take_rows(k_BMGD, rows), take_rows(v_BMGD, rows), mask_BM=mask_BM, prefix=prefix)

    return cropped


def take_rows(x_BM: Tensor, rows: Rows) -> Tensor:
    """Return those rows along the second dim of ``x_BM`` or ``x_BMHD``."""
    pieces = [x_BM[:, start:stop] for start, stop in rows]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)


def _heads_first(*several_BLHD: Tensor) -> tuple[Tensor, ...]:
    return tuple(x_BLHD.transpose(1, 2) for x_BLHD in several_BLHD)


def _attended(mask_BM: Tensor | None, prefix: Prefix | None) -> Tensor | None:
    """Return True where a query attends to a key, as (B or 1, L or 1, M), or None for everywhere."""
    if prefix is None:
        return None if mask_BM is None else mask_BM[:, None]
    seen_LM = prefix.place_M < prefix.reach_L[:, None]
    return seen_LM[None] if mask_BM is None else mask_BM[:, None] & seen_LM


def _bias(seen_BLM: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return the score bias of fused kernels, with one head: 0 for attended keys, ``MASKED`` for others.

    Rows begin at multiples of 16 elements, as some kernels require.
    """
    if seen_BLM is None:
        return None
    num_keys = seen_BLM.shape[2]
    bias_BLM = torch.zeros_like(seen_BLM, dtype=dtype).masked_fill(~seen_BLM, MASKED)
    return functional.pad(bias_BLM, (0, -num_keys % 16))[:, None, :, :num_keys]


def _mask_lse(lse_BHL: Tensor, seen_BLM: Tensor | None) -> Tensor:
    """Return ``lse`` with -inf for queries without keys, where fused kernels leave arbitrary values."""
    return lse_BHL if seen_BLM is None else lse_BHL.masked_fill(~seen_BLM.any(2)[:, None], -torch.inf)


def _cudnn_runs() -> bool:
    """Return whether cuDNN attention accepts a typical call; an old cuDNN or GPU refuses it when called.

    This is tried before any kernel is used, also where FlashAttention-3 serves most calls. The first call that it does
    not serve may be one that ``torch.compile`` traces or a CUDA graph captures, where nothing can be tried.
    """
    q_BHLD = torch.zeros(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16)
    try:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            torch.nn.functional.scaled_dot_product_attention(q_BHLD, q_BHLD, q_BHLD)
    except RuntimeError:
        return False
    return True
