"""cuBLASLt with a matrix product's algorithm named, where a measurement found a faster one than cuBLASLt's own choice.

``benchmarks.product_search`` measures; ``recorded/`` has what it found, a file per GPU. It is the same on every rank,
on every replica and from start to start, which a choice by timing at start would not be.
"""

from engines.torch_engine.cublaslt.algorithm import Algorithm
from engines.torch_engine.cublaslt.choice import recorded_matmul
from engines.torch_engine.cublaslt.library import CublasLt, CublasLtError
from engines.torch_engine.cublaslt.matmul import Matmul
from engines.torch_engine.cublaslt.problem import Epilogue, Problem
from engines.torch_engine.cublaslt.table import Recorded, Table

__all__ = [
    "Algorithm",
    "CublasLt",
    "CublasLtError",
    "Epilogue",
    "Matmul",
    "Problem",
    "Recorded",
    "Table",
    "recorded_matmul",
]
