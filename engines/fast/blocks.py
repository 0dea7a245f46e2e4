"""The blocks of a two-stream diffusion transformer (MM-DiT, arXiv:2403.03206) as records of GEMMs.

Dual-stream blocks come first, with separate weights for the context (text) and the latents. Single-stream blocks follow
and treat both streams alike.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from engines.core.model import Precision, Writers, WriteWeight
from engines.fast.gemm import DequantisedLinear, Float8Gemm, Gemm, QuantisedPart
from engines.fast.interface import HeadExchange
from engines.fast.kernels import HeadNorms, Modulation, Rows, add_normed, collected_rows, scaled_norm

CONTEXT, LATENTS = 0, 1


@dataclass(frozen=True, slots=True)
class Pair:
    """A GEMM for each of two streams."""

    context: Gemm
    """GEMM of the text's rows."""
    latents: Gemm
    """GEMM of the picture's rows."""

    def of_stream(self, stream: int) -> Gemm:
        return self.context if stream == CONTEXT else self.latents


@dataclass(frozen=True, kw_only=True, slots=True)
class DualBlock:
    """A dual-stream block."""

    qkv: Pair
    """Queries, keys and values as one GEMM."""
    out: Pair
    """Output projections of attention."""
    up: Pair
    """First GEMMs of the MLP, before its activation."""
    down: Pair
    """Second GEMMs of the MLP."""
    head_norms_S2D: Tensor
    """RMS norms of q and k, for the context's rows and for the latents'."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SingleBlock:
    """Attention and MLP side by side. The output projection is split by its input."""

    qkv: Gemm
    """Queries, keys and values as one GEMM."""
    up: Gemm
    """First GEMM of the MLP, before its activation."""
    out_mlp: Gemm
    """The output projection's part for the MLP, with the bias."""
    out_attention: Gemm
    """Its part for attention."""
    head_norms_S2D: Tensor
    """RMS norms of q and k."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """All blocks of a transformer, in running order. A modulated layer norm and a plain projection follow."""

    duals: tuple[DualBlock, ...]
    """Dual-stream blocks."""
    singles: tuple[SingleBlock, ...]
    """Single-stream blocks, which follow them."""
    precision: Precision
    """Precision of the GEMMs."""

    @property
    def quantizes(self) -> bool:
        """True if GEMMs of blocks read quantised rows."""
        return self.precision == "fp8"

    def quantizes_after_dual(self, index: int) -> bool:
        """Return whether the consumer of dual block ``index`` reads quantised rows: only blocks do."""
        return self.quantizes and (index + 1 < len(self.duals) or bool(self.singles))


class BlockModulation(Protocol):
    """One step's modulation and gates by place. Gates (``gate_SBC``) have one or two segments (streams)."""

    @property
    def first_rows(self) -> int:
        """Number of the context's rows."""
        ...

    def first(self) -> Modulation:
        """Return the modulation of the norm before the first block."""
        ...

    def dual_middle(self, index: int) -> tuple[Tensor, Modulation]:
        """Return the gate of dual block ``index``'s attention, and the modulation of the norm before its MLP."""
        ...

    def dual_end(self, index: int) -> tuple[Tensor, Modulation]:
        """Return the gate of dual block ``index``'s MLP, and the modulation of the next norm."""
        ...

    def single_end(self, index: int) -> tuple[Tensor, Modulation]:
        """Return the gate of single block ``index``, and the modulation of the next norm."""
        ...


def writers_of(blocks: Iterable[object]) -> Writers:
    """Return the weight writers of all float8 GEMMs in ``blocks`` (records of GEMMs), by parameter."""
    writers: dict[nn.Parameter, tuple[WriteWeight, ...]] = {}
    for block in blocks:
        for gemm in _float8_in(block):
            for parameter, write in gemm.writers():
                writers[parameter] = (*writers.get(parameter, ()), write)
    return writers


@torch.no_grad()
def release_weights(module: nn.Module, blocks: Iterable[object], unless: Collection[nn.Parameter]) -> None:
    """Replace the layers of ``module`` whose weights are in float8 GEMMs of ``blocks``, ``unless`` they change later.

    The new layers compute with the memory of the GEMMs.
    """
    released: dict[Tensor, list[QuantisedPart]] = {}
    for gemm in (gemm for block in blocks for gemm in _float8_in(block)):
        for one in gemm.release(unless):
            released.setdefault(one.part.parameter, []).append(one)
    for name, layer in [*module.named_modules()]:
        if isinstance(layer, nn.Linear) and (parts := released.get(layer.weight)):
            module.set_submodule(name, DequantisedLinear(layer, parts))


def _float8_in(record: object) -> Iterator[Float8Gemm]:
    if isinstance(record, Float8Gemm):
        yield record
    elif is_dataclass(record):
        for field in fields(record):
            yield from _float8_in(getattr(record, field.name))


NUM_VECTORS = 4
"""Vectors of a block: scale and gate of attention, then of the MLP. Weights of the norms are folded into them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrePostNormBlock:
    """A block with norms around: ``x += gate * norm(out(attention(qkv(norm(x) * scale))))``, then the MLP alike."""

    qkv: Gemm
    """Queries, keys and values as one GEMM."""
    out: Gemm
    """Output projection of attention."""
    up: Gemm
    """First GEMM of the MLP, with its activation."""
    down: Gemm
    """Second GEMM of the MLP."""
    head_norms_S2D: Tensor
    """RMS norms of q and k."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrePostNormStep:
    """One step through all blocks of one rank's tokens."""

    blocks: Sequence[PrePostNormBlock]
    """Blocks in running order."""
    exchange: HeadExchange
    """Attention over the team's tokens."""
    vectors_VBC: Tensor
    """``NUM_VECTORS`` for each block, one block after another."""
    cos_LP: Tensor
    """Cosine of the rotation of this rank's queries and keys, by token and pair of features."""
    sin_LP: Tensor
    """Sine of the same."""
    batch: int
    """Rows of a token: entries of the batch."""
    eps: float
    """Epsilon of all norms."""
    precision: Precision
    """Precision of the GEMMs, which decides the form of normed rows."""

    def run(self, x_RC: Tensor) -> Tensor:
        """Return the rows after all blocks, in the memory of ``x_RC``."""
        quantize = self.precision == "fp8"
        normed = scaled_norm(x_RC, self.vectors_VBC[0], eps=self.eps, quantize=quantize)
        for index, block in enumerate(self.blocks):
            vectors_VBC = self.vectors_VBC[index * NUM_VECTORS :]
            _, gate_BC, mlp_scale_BC, mlp_gate_BC = vectors_VBC[:NUM_VECTORS].unbind(0)
            following_BC = vectors_VBC[NUM_VECTORS if index + 1 < len(self.blocks) else 0]  # unused after the last
            update_RC = block.out(self._attended(block, normed))
            normed = add_normed(x_RC, update_RC, gate_BC, mlp_scale_BC, eps=self.eps, quantize=quantize)
            update_RC = block.down(block.up.activated(normed))
            normed = add_normed(x_RC, update_RC, mlp_gate_BC, following_BC, eps=self.eps, quantize=quantize)
        return x_RC

    def _attended(self, block: PrePostNormBlock, normed: Rows) -> Rows:
        qkv_RE = block.qkv(normed)
        qkv_R3HD = qkv_RE.view(qkv_RE.shape[0], 3, -1, block.head_norms_S2D.shape[-1])
        norms = HeadNorms(
            weight_S2D=block.head_norms_S2D, cos_LP=self.cos_LP, sin_LP=self.sin_LP, first_rows=0, eps=self.eps
        )
        self.exchange.send_run(qkv_R3HD, self.batch, norms, 0, qkv_RE.shape[0])
        attended = self.exchange.send_rest(qkv_R3HD, self.batch, norms).attend()
        return collected_rows(attended.collect(), self.precision)
