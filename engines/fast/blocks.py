"""The blocks of a diffusion transformer with two streams (MM-DiT, arXiv:2403.03206) as records of GEMMs.

Dual-stream blocks come first, with weights of their own for the context (text) and the latents; then single-stream
blocks, which take both streams alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Protocol

from torch import Tensor, nn

from engines.core.model import Precision, Writers, WriteWeight
from engines.fast.gemm import Float8Gemm, Gemm
from engines.fast.interface import HeadExchange
from engines.fast.kernels import HeadNorms, Modulation, Rows, add_normed, collected_rows, scaled_norm

CONTEXT, LATENTS = 0, 1


@dataclass(frozen=True, slots=True)
class Pair:
    """One GEMM per stream."""

    context: Gemm
    latents: Gemm

    def of_stream(self, stream: int) -> Gemm:
        return self.context if stream == CONTEXT else self.latents


@dataclass(frozen=True, kw_only=True, slots=True)
class DualBlock:
    """``qkv``: queries, keys and values as one; ``up`` and ``down``: the MLP's two GEMMs, with an activation
    between them.

    ``head_norms_S2D``: RMS norms of q and k, of the context's and of the latents' rows.
    """

    qkv: Pair
    out: Pair
    up: Pair
    down: Pair
    head_norms_S2D: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class SingleBlock:
    """Attention and MLP side by side; the output projection is cut by input, the MLP's share has the bias."""

    qkv: Gemm
    up: Gemm
    out_mlp: Gemm
    out_attention: Gemm
    head_norms_S2D: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """All blocks of a transformer, in running order. A modulated layer norm and a plain projection follow them."""

    duals: tuple[DualBlock, ...]
    singles: tuple[SingleBlock, ...]
    precision: Precision

    @property
    def quantizes(self) -> bool:
        """Says whether GEMMs of blocks read quantised rows."""
        return self.precision == "fp8"

    def quantizes_after_dual(self, index: int) -> bool:
        """Says whether what follows dual block ``index`` reads quantised rows: blocks do, the last projection not."""
        return self.quantizes and (index + 1 < len(self.duals) or bool(self.singles))


class BlockModulation(Protocol):
    """One step's modulation and gates by place. Gates (``gate_SBC``) have one or two segments: streams."""

    @property
    def first_rows(self) -> int:
        """The number of the context's rows."""
        ...

    def first(self) -> Modulation:
        """Returns the modulation of the norm before the first block."""
        ...

    def dual_middle(self, index: int) -> tuple[Tensor, Modulation]:
        """Returns the gate of dual block ``index``'s attention, and the modulation of the norm before its MLP."""
        ...

    def dual_end(self, index: int) -> tuple[Tensor, Modulation]:
        """Returns the gate of its MLP, and the modulation of the norm before what follows."""
        ...

    def single_end(self, index: int) -> tuple[Tensor, Modulation]:
        """Returns the gate of single block ``index``, and the modulation of the norm before what follows."""
        ...


def writers_of(blocks: Iterable[object]) -> Writers:
    """Returns those of all float8 GEMMs in ``blocks``, which are records of GEMMs, by parameter."""
    writers: dict[nn.Parameter, tuple[WriteWeight, ...]] = {}
    for block in blocks:
        for gemm in _float8_in(block):
            for parameter, write in gemm.writers():
                writers[parameter] = (*writers.get(parameter, ()), write)
    return writers


def _float8_in(record: object) -> Iterator[Float8Gemm]:
    if isinstance(record, Float8Gemm):
        yield record
    elif is_dataclass(record):
        for field in fields(record):
            yield from _float8_in(getattr(record, field.name))


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
