"""AllGather-KV: a rank keeps its queries and gathers keys and values in one exchange (Llama 3, arXiv:2407.21783)."""

from __future__ import annotations

import torch
from torch import Tensor

from engines.core.kernel import Kernel, Prefix
from engines.parallel.communication.collectives import Axis, all_gather, join_masks, join_places


def allgather_kv(kernel: Kernel, axis: Axis) -> Kernel:
    """``kernel`` of my queries over the keys of all ranks of the axis, in rank order. Any number of heads will do."""

    def gathered(
        q_BLHD: Tensor,
        k_BLGD: Tensor,
        v_BLGD: Tensor,
        /,
        *,
        mask_BM: Tensor | None = None,
        prefix: Prefix | None = None,
    ) -> tuple[Tensor, Tensor]:
        all_N2BLGD = all_gather(torch.stack((k_BLGD, v_BLGD)), axis)
        k_BMGD, v_BMGD = all_N2BLGD.permute(1, 2, 0, 3, 4, 5).flatten(2, 3).unbind(0)
        mask_BM = None if mask_BM is None else join_masks(mask_BM, axis)
        prefix = None if prefix is None else prefix._replace(place_M=join_places(prefix.place_M, axis))
        return kernel(q_BLHD, k_BMGD, v_BMGD, mask_BM=mask_BM, prefix=prefix)

    return gathered
