"""Blocks with one stream and RMS norms around both of their halves, as a sequence of GEMMs, fused passes, exchanges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from engines.core.fast_model import Precision
from engines.fast.gemm import Gemm
from engines.fast.interface import HeadExchange
from engines.fast.kernels import HeadNorms, Rows, add_normed, collected_rows, scaled_norm

NUM_VECTORS = 4
"""Of a block: scale and gate of attention, then of the MLP. Weights of the norms are factors in them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SandwichBlock:
    """``x += gate * norm(out(attention(qkv(norm(x) * scale))))``, and the same with an MLP, ``down(act(up(...)))``.

    ``head_norms_S2D``: the RMS norms of q and k.
    """

    qkv: Gemm
    out: Gemm
    up: Gemm
    down: Gemm
    head_norms_S2D: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class SandwichStep:
    """One step through ``blocks``. ``vectors_VBC`` has ``NUM_VECTORS`` for each, one after the other.

    ``cos_LP`` and ``sin_LP`` turn my tokens' queries and keys; rows are tokens × ``batch``; ``eps`` is that of all
    norms.
    """

    blocks: Sequence[SandwichBlock]
    exchange: HeadExchange
    vectors_VBC: Tensor
    cos_LP: Tensor
    sin_LP: Tensor
    batch: int
    eps: float
    precision: Precision

    def run(self, x_RC: Tensor) -> Tensor:
        """Returns the rows after all blocks, in the memory of ``x_RC``."""
        quantize = self.precision == "fp8"
        normed = scaled_norm(x_RC, self.vectors_VBC[0], eps=self.eps, quantize=quantize)
        for index, block in enumerate(self.blocks):
            vectors_VBC = self.vectors_VBC[index * NUM_VECTORS :]
            _, gate_BC, mlp_scale_BC, mlp_gate_BC = vectors_VBC[:NUM_VECTORS].unbind(0)
            following_BC = vectors_VBC[NUM_VECTORS if index + 1 < len(self.blocks) else 0]  # of the last none is read
            update_RC = block.out(self._attended(block, normed))
            normed = add_normed(x_RC, update_RC, gate_BC, mlp_scale_BC, eps=self.eps, quantize=quantize)
            update_RC = block.down(block.up.activated(normed))
            normed = add_normed(x_RC, update_RC, mlp_gate_BC, following_BC, eps=self.eps, quantize=quantize)
        return x_RC

    def _attended(self, block: SandwichBlock, normed: Rows) -> Rows:
        qkv_RE = block.qkv(normed)
        qkv_R3HD = qkv_RE.view(qkv_RE.shape[0], 3, -1, block.head_norms_S2D.shape[-1])
        norms = HeadNorms(
            weight_S2D=block.head_norms_S2D, cos_LP=self.cos_LP, sin_LP=self.sin_LP, first_rows=0, eps=self.eps
        )
        self.exchange.send_run(qkv_R3HD, self.batch, norms, 0, qkv_RE.shape[0])
        attended = self.exchange.send_rest(qkv_R3HD, self.batch, norms).attend()
        return collected_rows(attended.collect(), self.precision)
