"""Fused elementwise steps between GEMMs: one pass over memory each, in Triton on CUDA, else in plain PyTorch.

Dims: R rows (tokens × batch, batch innermost), C channels, S segments of rows with a modulation of their own, B batch.
The plain version of each is its specification and the path on the CPU.
"""

from engines.fast.kernels.gate import gated
from engines.fast.kernels.heads import norm_and_rotate
from engines.fast.kernels.join import collected_rows, join_columns, join_rows
from engines.fast.kernels.norm import norm_modulate, residual_norm_modulate
from engines.fast.kernels.quantize import quantize_rows, quantize_weight
from engines.fast.kernels.records import HeadNorms, Modulation
from engines.fast.kernels.rows import QuantRows, Rows
from engines.fast.kernels.sandwich import add_normed, scaled_norm

__all__ = [
    "HeadNorms",
    "Modulation",
    "QuantRows",
    "Rows",
    "add_normed",
    "collected_rows",
    "gated",
    "join_columns",
    "join_rows",
    "norm_and_rotate",
    "norm_modulate",
    "quantize_rows",
    "quantize_weight",
    "residual_norm_modulate",
    "scaled_norm",
]
