"""Group norm of feature maps in channels-last memory, with SiLU: two passes over memory on CUDA.

PyTorch's own kernel copies such maps to another layout first, and SiLU takes one more pass.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class ChannelsLastGroupNorm(nn.Module):
    """``norm`` with its own weights, followed by SiLU if ``silu``; float32 inside.

    On CUDA the result lies in channels-last memory. An input in another layout is copied to that first.
    """

    def __init__(self, norm: nn.GroupNorm, *, silu: bool) -> None:
        super().__init__()
        self.norm, self.silu = norm, silu

    def forward(self, x_BCHW: Tensor) -> Tensor:
        if x_BCHW.is_cuda:
            from engines.fast.triton_group_norm import launch_group_norm

            with torch.cuda.device(x_BCHW.device):  # Triton launches on the current device, the thread's own
                return launch_group_norm(x_BCHW, self.norm, silu=self.silu)
        normed_BCHW = functional.group_norm(
            x_BCHW.float(), self.norm.num_groups, _float(self.norm.weight), _float(self.norm.bias), self.norm.eps
        )
        return (functional.silu(normed_BCHW) if self.silu else normed_BCHW).to(x_BCHW.dtype)


def _float(weight_C: Tensor | None) -> Tensor | None:
    return None if weight_C is None else weight_C.float()
