"""Attention in steps whose prompts are filled up: what fills them is masked.

The mask is one of a step's tensors, so that a captured step serves prompts of every length that is filled up alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engines.core.kernel import Kernel
from engines.core.layout import TokenLayout
from engines.parallel.attention.local import crop_keys, local_kernel
from engines.torch_engine.exchange.heads import Attend


class KeptKeys:
    """Which keys the next run attends to: ``mask_M`` in the order in which one rank's attention has them."""

    def __init__(self, layout: TokenLayout, chunks: range) -> None:
        """``chunks`` are those of the ranks whose keys are there when a mask is asked for."""
        self._layout, self._chunks = layout, chunks
        self.mask_M: Tensor | None = None

    def in_order(self, kept_N: Tensor) -> Tensor:
        """Return ``mask_M`` from what is kept of all streams' tokens; a chunk's padding is not."""
        names = tuple(name for name, _ in self._layout.lengths)
        chunks = (self._layout.cut_streams(kept_N, dim=0, streams=names, index=index) for index in self._chunks)
        return torch.cat(list(chunks))

    def attend(self, kernel: Kernel) -> Attend:
        def masked(q_BLHD: Tensor, k_BMHD: Tensor, v_BMHD: Tensor) -> Tensor:
            assert self.mask_M is not None, "a step whose prompts are filled up says which keys it attends to"
            mask_BM = self.mask_M.expand(q_BLHD.shape[0], -1)
            return kernel(q_BLHD, k_BMHD, v_BMHD, mask_BM=mask_BM)[0]

        return masked


def whole_kernel(layout: TokenLayout, sample: Tensor) -> Kernel:
    """Return local attention over the keys of all ranks, as ``local_attention`` has them."""
    return crop_keys(local_kernel(sample.device, sample.dtype), layout.valid_rows(0, layout.num_chunks))
