"""A picture's decoder for CUDA in channels-last memory, its norms fused with what follows them.

Convolutions prefer that layout. There is nothing to compile, so a new process is ready at once, and every process has
the same kernels.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn

from engines.fast.kernels import group_norm
from pipelines.vae.layers import is_supported_resnet


class FusedGroupNorm(nn.Module):
    """``norm`` with its own weights, and SiLU (``kernels.group_norm``)."""

    def __init__(self, norm: nn.GroupNorm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return group_norm(x_BCHW, self.norm, silu=True)


class FusedResnet(nn.Module):
    """A supported residual block (``is_supported_resnet``) with the weights of ``block``."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.norm1 = FusedGroupNorm(block.norm1)
        self.norm2 = FusedGroupNorm(block.norm2)
        self.conv1, self.conv2, self.conv_shortcut = block.conv1, block.conv2, block.conv_shortcut
        self.output_scale_factor = float(block.output_scale_factor)

    def forward(self, x_BCHW: Tensor, temb: None = None) -> Tensor:
        inner_BCHW: Tensor = self.conv2(self.norm2(self.conv1(self.norm1(x_BCHW))))
        inner_BCHW += x_BCHW if self.conv_shortcut is None else self.conv_shortcut(x_BCHW)
        return inner_BCHW if self.output_scale_factor == 1 else inner_BCHW / self.output_scale_factor


def fuse_decoder(decoder: nn.Module) -> Any:
    """Return a copy of a supported ``decoder`` with weights of its own in channels-last memory, its norms fused."""
    fused: Any = copy.deepcopy(decoder)
    fused.to(memory_format=torch.channels_last)
    for name, block in list(fused.named_modules()):
        if isinstance(block, ResnetBlock2D) and _can_be_fused(block):
            fused.set_submodule(name, FusedResnet(block))
    if isinstance(fused.conv_act, nn.SiLU):
        fused.conv_norm_out = FusedGroupNorm(fused.conv_norm_out)
        fused.conv_act = nn.Identity()
    return fused


def _can_be_fused(block: ResnetBlock2D) -> bool:
    return is_supported_resnet(block) and isinstance(block.nonlinearity, nn.SiLU) and not block.dropout.p
