"""The calls of cuBLASLt that are needed here, and its numbers (cublasLt.h, cuBLAS 13)."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

BFLOAT16, FLOAT32, COMPUTE_FLOAT32 = 14, 0, 68
TRANSPOSED, PLAIN = 1, 0
# cublasLtMatmulDescAttributes_t
TRANSPOSE_A, TRANSPOSE_B, EPILOGUE, BIAS_POINTER = 3, 4, 7, 8
# cublasLtMatmulAlgoCapAttributes_t, cublasLtMatmulAlgoConfigAttributes_t
CAN_TILES = 6
TILE, OPTION, STAGES, CLUSTER = 1, 5, 6, 8

TYPES = (COMPUTE_FLOAT32, FLOAT32, BFLOAT16, BFLOAT16, BFLOAT16, BFLOAT16)
"""Of computing, of alpha and beta, of A, B, C and D."""


class CublasLtError(RuntimeError):
    """A call was refused: its name and cuBLAS's status."""


class AlgorithmData(ctypes.Structure):
    """``cublasLtMatmulAlgo_t``, opaque."""

    _fields_ = (("data", ctypes.c_uint64 * 8),)


class Checked(ctypes.Structure):
    """``cublasLtMatmulHeuristicResult_t``."""

    _fields_ = (
        ("algorithm", AlgorithmData),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class CublasLt:
    """The library that PyTorch has loaded, with a handle for the current GPU."""

    def __init__(self, functions: Any = None) -> None:
        """``functions``: the loaded library (default: PyTorch's)."""
        self._functions = _loaded() if functions is None else functions
        self.handle = ctypes.c_void_p()
        self.call("Create", ctypes.byref(self.handle))

    @property
    def version(self) -> str:
        """ "13.1"."""
        number = int(self._functions.cublasLtGetVersion())
        return f"{number // 10000}.{number % 10000 // 100}"

    def call(self, name: str, *arguments: Any) -> None:
        """Raises CublasLtError."""
        status = getattr(self._functions, f"cublasLt{name}")(*arguments)
        if status:
            raise CublasLtError(f"cublasLt{name} refused: status {status}")

    def accepts(self, name: str, *arguments: Any) -> bool:
        return not getattr(self._functions, f"cublasLt{name}")(*arguments)

    def put(self, setter: str, target: Any, attribute: int, value: Any) -> None:
        self.call(setter, target, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))


@cache
def _loaded() -> Any:
    assert torch.version.cuda is not None
    functions = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
    functions.cublasLtGetVersion.restype = ctypes.c_size_t
    return functions
