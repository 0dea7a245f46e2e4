"""The gated linear unit between a MLP's two GEMMs (SwiGLU, arXiv:2002.05202)."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def gated(x_RE: Tensor) -> Tensor:
    """Returns ``silu(first half) * second half`` of each row, float32 inside."""
    if x_RE.is_cuda:
        from engines.fast.kernels.gate_triton import launch_gated

        return launch_gated(x_RE)
    gate_RF, up_RF = x_RE.float().chunk(2, dim=1)
    return (functional.silu(gate_RF) * up_RF).to(x_RE.dtype)
