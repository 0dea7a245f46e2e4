"""Check of one peer on this host's GPU: it imports what it needs, and its kernels are there.

``python -m benchmarks.peers.check NAME`` prints what was found, or ends with the error.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable

SHAPE_BLHD = (1, 4608, 24, 128)
"""FLUX.1 at 1024²."""
LARGEST_ERROR = 0.02
"""Relative error between two kernels in bf16."""


def attention() -> str:
    """Compare FlashAttention-3 of fa3-fwd, which peers call, with PyTorch's attention."""
    import torch

    q, k, v = (torch.randn(SHAPE_BLHD, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    found = importlib.import_module("fa3_fwd_interface").flash_attn_func(q, k, v)
    found = (found[0] if isinstance(found, tuple) else found).float()
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).float()
    error = ((found - expected).norm() / expected.norm()).item()
    if not error < LARGEST_ERROR:
        raise ValueError(f"FlashAttention-3 is wrong: relative error {error}")
    return f"FlashAttention-3, relative error {error:.1e}"


def sglang() -> str:
    """Import SGLang's transformer, and build the kernels that it builds with nvcc at their first call."""
    import torch

    from benchmarks.peers.sglang import make_importable

    os.environ.setdefault("LOCAL_RANK", "0")
    make_importable()
    importlib.import_module("sglang.multimodal_gen.runtime.models.dits.flux")
    from sglang.kernels.kda_kernels.residual_gate_add_jit import _jit_residual_gate_add_module as gate
    from sglang.kernels.ops.diffusion.modulate.modulate_scale_shift_jit import (
        _jit_modulate_scale_shift_kernel as modulate,
    )
    from sglang.kernels.ops.diffusion.rope.qknorm_rope_jit import _jit_qknorm_rope_module as normalize
    from sglang.multimodal_gen.runtime.platforms import current_platform

    head = SHAPE_BLHD[-1]
    normalize(head, head, False, torch.bfloat16, torch.float32, False)
    modulate(torch.bfloat16)
    gate(torch.bfloat16)
    return f"attention by {current_platform.get_attn_backend_cls_str(None, head, torch.bfloat16)}"


def vllm_omni() -> str:
    """Import vLLM-Omni's transformer and vLLM's compiled normalization."""
    import torch

    from benchmarks.peers.vllm_omni import make_importable

    make_importable()
    importlib.import_module("vllm_omni.diffusion.models.flux.flux_transformer")
    from vllm.platforms import current_platform
    from vllm_omni.platforms import current_omni_platform

    current_platform.import_kernels()
    backend = current_omni_platform.get_diffusion_attn_backend_cls(None, SHAPE_BLHD[-1])
    return f"normalization by {torch.ops._C.rms_norm}, attention by {backend}"


CHECKS: dict[str, Callable[[], str]] = {"attention": attention, "sglang": sglang, "vllm_omni": vllm_omni}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=CHECKS)
    print(CHECKS[parser.parse_args().name]())


if __name__ == "__main__":
    main()
