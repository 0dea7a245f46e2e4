"""The blocks of a diffusion transformer with two streams (MM-DiT, arXiv:2403.03206) as records of GEMMs.

Dual-stream blocks come first, with weights of their own for the context (text) and the latents; then single-stream
blocks, which take both streams alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engines.core.fast_model import Precision
from engines.fast.gemm import Gemm
from engines.fast.kernels import Modulation

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
