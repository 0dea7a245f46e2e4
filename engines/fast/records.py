"""Inputs of fused operations: rows of activations with their modulation and norms, weights with what is added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from engines.core.model import LowRank
from engines.quantization.linear import FP8, row_scales


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantRows:
    """Rows of float8 with a scale each: ``values_RC`` times ``scale_R1``."""

    values_RC: Tensor
    """float8 e4m3."""
    scale_R1: Tensor
    """float32."""

    def dequantized(self) -> Tensor:
        """Return the rows, float32."""
        return self.values_RC.float() * self.scale_R1

    def __getitem__(self, rows: slice) -> QuantRows:
        return QuantRows(values_RC=self.values_RC[rows], scale_R1=self.scale_R1[rows])


Rows = Tensor | QuantRows


def quantized(x_RC: Tensor) -> QuantRows:
    """Return ``x_RC`` quantised in plain PyTorch: each row's largest magnitude maps to the largest float8."""
    scale_R1 = row_scales(x_RC, "fp8")
    return QuantRows(values_RC=(x_RC.float() / scale_R1).to(FP8), scale_R1=scale_R1)


FrameProducts: TypeAlias = "tuple[Tensor, Tensor, Tensor, Tensor]"
"""Four tensors that make pairs of frames (``frames``): the even frame is 0 + 1 + 2, the odd one 1 - 2 - 3."""

Edges: TypeAlias = Literal["replicate", "reflect"] | None
"""Pixels that a convolution reads around a frame, as in ``torch.nn.functional.pad``; None: there are none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """Pairs of frames among those of a clip."""

    number: int
    """Pairs of each clip."""
    start: int = 0
    """First frame of the first pair. A frame before the clip, or after it, is the clip's first, or its last."""


EPS = 1e-6
"""Default term added to the variance in layer norms and to the mean square in RMS norms."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Modulation:
    """Shift and scale after a layer norm, one vector per segment and batch entry."""

    shift_SBC: Tensor
    """Added to normed rows."""
    scale_SBC: Tensor
    """One less than the factor on normed rows."""
    first_rows: int
    """Number of rows at the beginning, which use segment 0. The others use the last segment, or the only one."""
    last_rows: int = 0
    """Number of rows at the end, which use segment 2 of three. The rows between use segment 1."""

    def of_stream(self, number: int, num_rows: int) -> Modulation:
        """Return the modulation of the first (0) or the last (1) segment alone, for its ``num_rows`` rows."""
        vectors = (x_SBC[:1] if number == 0 else x_SBC[-1:] for x_SBC in (self.shift_SBC, self.scale_SBC))
        shift_1BC, scale_1BC = vectors
        return Modulation(shift_SBC=shift_1BC, scale_SBC=scale_1BC, first_rows=num_rows)

    def per_row(self, x_SBC: Tensor, num_rows: int) -> Tensor:
        """Return ``x_SBC`` repeated over its rows, float32."""
        num_segments, batch, _ = x_SBC.shape
        counts = (self.first_rows, num_rows - self.first_rows - self.last_rows, self.last_rows)
        segments = (x_SBC[min(number, num_segments - 1)] for number in range(len(counts)))
        parts = (x_BC.float().repeat(rows // batch, 1) for x_BC, rows in zip(segments, counts, strict=True))
        return torch.cat([*parts])


class RowNorm(NamedTuple):
    """RMS norm of queries or keys."""

    weight: Tensor | None
    """Factors of ``features``."""
    features: int
    """Number of features that it takes together: those of all heads, or of one."""
    eps: float
    """Term added to the mean square."""
    rounded: bool = False
    """True if values have the dtype of ``weight`` when they are multiplied by it; else they are in float32."""


class RotaryTables(NamedTuple):
    """Tables of a rotary embedding (Su et al. 2021, arXiv:2104.09864), with any strides, and the pairs it rotates.

    Dims: B batch, L tokens, H heads, P pairs of features. With fewer than D / 2 pairs, a head's last features stay.
    """

    cos_BLHP: Tensor
    """B and H may be 1."""
    sin_BLHP: Tensor
    """Shaped as ``cos_BLHP``."""
    interleaved: bool
    """True if a pair are neighbours; else they are P features apart."""
    rounded: bool = False
    """True if tables and products are rounded to the dtype of what is rotated; else all is in float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadNorms:
    """Bias, RMS norm and rotation of q and k, per head."""

    weight_S2D: Tensor
    """Weights of the norms for each segment, of q and of k."""
    cos_LP: Tensor
    """float32 cosine of the rotation of the pair (2p, 2p + 1) of token l."""
    sin_LP: Tensor
    """float32 sine of the same."""
    first_rows: int
    """So many rows use segment 0, the others the last one."""
    bias_3HD: Tensor | None = None
    """Added to q, k and v before the norm; None: the GEMM has added it, or there is none."""
    eps: float = EPS
    """Epsilon of the RMS norms."""

    def run(self, start: int, stop: int, batch: int) -> HeadNorms:
        """Return the norms of the rows from ``start`` to ``stop`` alone."""
        tables = (table_LP[start // batch : stop // batch] for table_LP in (self.cos_LP, self.sin_LP))
        cos_LP, sin_LP = tables
        first_rows = min(max(self.first_rows - start, 0), stop - start)
        return replace(self, cos_LP=cos_LP, sin_LP=sin_LP, first_rows=first_rows)


MAX_SUMS = 64
"""Weights whose sums one launch computes; a power of two."""
EACH = 8
"""Elements that a thread reads at once, where shapes and addresses allow."""
ALIGNMENT = 16
"""Bytes of these elements, in half precision."""

Products: TypeAlias = Sequence[tuple[float, LowRank]]
"""Low-rank products of one weight, each with its amount."""


class Kind(NamedTuple):
    """Properties that all sums of one launch share."""

    weight: torch.dtype
    """Dtype of the weights."""
    factor: torch.dtype
    """Dtype of the products' factors."""
    is_single: bool
    """True if each weight has one product."""
    each: int
    """Divides the numbers of columns, and of elements from row to row: ``EACH`` or 1."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WeightSum:
    """``out = base + sum(amount * scale * up @ down)``; see ``weight_sums.fits``."""

    out_NK: Tensor
    """Its rows are contiguous. It may be ``base_NK`` itself."""
    base_NK: Tensor
    """Its rows are contiguous."""
    products: Products
    """Products from ``weight_sums.prepared``."""

    @property
    def kind(self) -> Kind:
        """Key that chooses the kernel. No share of a weight has another ``is_single`` or dtype than the whole one."""
        base_NK, out_NK = self.base_NK, self.out_NK
        sizes = base_NK.shape[1] | base_NK.stride(0) | out_NK.stride(0)
        is_aligned = sizes % EACH == 0 and (base_NK.data_ptr() | out_NK.data_ptr()) % ALIGNMENT == 0
        factor = self.products[0][1].up_NR.dtype
        return Kind(base_NK.dtype, factor, len(self.products) == 1, EACH if is_aligned else 1)
