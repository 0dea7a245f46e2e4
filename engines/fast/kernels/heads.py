"""RMS norm and rotary embedding of queries and keys, written straight into the layout that an exchange sends."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from engines.fast.kernels.records import HeadNorms


def norm_and_rotate(qkv_R3HD: Tensor, norms: HeadNorms, out_LB3HD: Tensor) -> None:
    """Writes q and k (normalised, turned) and v (as it is) of all rows into ``out``, a view with any strides.

    Rows are tokens × batch, batch innermost. ``out`` has dims (L, B, 3, ..., D) whose middle dims number the heads; if
    there is room for more heads than there are, what lies there afterwards means nothing.
    When ``out`` is a view of ``qkv`` itself, v stays where it is, and there must be no bias.
    """
    assert norms.bias_3HD is None or out_LB3HD.data_ptr() != qkv_R3HD.data_ptr(), "v would not get its bias"
    if qkv_R3HD.is_cuda:
        from engines.fast.kernels.heads_triton import launch_norm_and_rotate

        launch_norm_and_rotate(qkv_R3HD, norms, out_LB3HD)
        return
    rows, _, _, dim = qkv_R3HD.shape
    if norms.bias_3HD is not None:
        qkv_R3HD = qkv_R3HD + norms.bias_3HD
    weight_R12D = torch.cat(
        (
            norms.weight_S2D[:1].expand(norms.first_rows, 2, dim),
            norms.weight_S2D[-1:].expand(rows - norms.first_rows, 2, dim),
        )
    ).unsqueeze(2)
    x_R2HD = qkv_R3HD[:, :2].float()
    x_R2HD = x_R2HD * torch.rsqrt(x_R2HD.square().mean(-1, keepdim=True) + norms.eps) * weight_R12D.float()
    even, odd = x_R2HD[..., 0::2], x_R2HD[..., 1::2]
    batch = out_LB3HD.shape[1]
    cos, sin = (table_LP.repeat_interleave(batch, 0)[:, None, None] for table_LP in (norms.cos_LP, norms.sin_LP))
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    both_R3HD = torch.cat((turned.to(qkv_R3HD.dtype), qkv_R3HD[:, 2:]), dim=1)
    missing = math.prod(out_LB3HD.shape[3:-1]) - both_R3HD.shape[2]
    both_R3HD = functional.pad(both_R3HD, (0, 0, 0, missing))
    out_LB3HD.copy_(both_R3HD.view(out_LB3HD.shape[0], batch, 3, *out_LB3HD.shape[3:-1], dim))
