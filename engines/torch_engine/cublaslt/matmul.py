"""One matrix product by one algorithm."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from engines.torch_engine.cublaslt.algorithm import Algorithm
from engines.torch_engine.cublaslt.library import (
    BFLOAT16,
    BIAS_POINTER,
    COMPUTE_FLOAT32,
    EPILOGUE,
    FLOAT32,
    PLAIN,
    TRANSPOSE_A,
    TRANSPOSE_B,
    TRANSPOSED,
    Checked,
    CublasLt,
    CublasLtError,
)
from engines.torch_engine.cublaslt.problem import Epilogue, Problem

WORKSPACE_BYTES = 32 * 2**20
"""What an algorithm may use besides its matrices; as much as PyTorch gives one on such GPUs."""
_EPILOGUES: dict[Epilogue, int] = {"none": 1, "bias": 4, "gelu": 36, "add": 1}


class Descriptors:
    """A problem in cuBLASLt's words, whose matrices are column-major: ``out.T = weight @ x.T``."""

    def __init__(self, problem: Problem, library: CublasLt) -> None:
        self._library = library
        self.product = ctypes.c_void_p()
        library.call("MatmulDescCreate", ctypes.byref(self.product), COMPUTE_FLOAT32, FLOAT32)
        for attribute, value in (
            (TRANSPOSE_A, TRANSPOSED),
            (TRANSPOSE_B, PLAIN),
            (EPILOGUE, _EPILOGUES[problem.epilogue]),
        ):
            library.put("MatmulDescSetAttribute", self.product, attribute, ctypes.c_int(value))
        self.weight = self._layout(problem.inner, problem.features)
        self.x = self._layout(problem.inner, problem.rows)
        self.out = self._layout(problem.features, problem.rows)

    def workspace_bytes(self, data: Any) -> int | None:
        """What the algorithm wants; None: it cannot do it."""
        checked = Checked()
        layouts = (self.weight, self.x, self.out, self.out)
        arguments = (self._library.handle, self.product, *layouts, ctypes.byref(data), ctypes.byref(checked))
        accepted = self._library.accepts("MatmulAlgoCheck", *arguments)
        return int(checked.workspace_bytes) if accepted and checked.state == 0 else None

    def _layout(self, rows: int, columns: int) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        extent = (ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows))
        self._library.call("MatrixLayoutCreate", ctypes.byref(layout), BFLOAT16, *extent)
        return layout


class Matmul:
    """``problem`` by ``algorithm``, on the current stream of the library's GPU. Raises CublasLtError if it cannot."""

    def __init__(self, problem: Problem, algorithm: Algorithm, library: CublasLt) -> None:
        self._problem, self._library = problem, library
        self._descriptors = Descriptors(problem, library)
        self._data = algorithm.data(library)
        self._one = ctypes.c_float(1)
        self._beta = ctypes.c_float(1 if problem.epilogue == "add" else 0)
        wanted_bytes = self._descriptors.workspace_bytes(self._data)
        if wanted_bytes is None or wanted_bytes > WORKSPACE_BYTES:
            raise CublasLtError(f"cuBLASLt {library.version} cannot do {problem} by {algorithm}")
        self.workspace_bytes = wanted_bytes

    def __call__(self, x_RK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out_RN: Tensor | None = None) -> Tensor:
        """``bias_N`` for "bias" and "gelu", None for the others. ``out_RN`` is made if not given; "add" adds to it."""
        problem, its = self._problem, self._descriptors
        assert (bias_N is not None) == (problem.epilogue in ("bias", "gelu")), problem
        if out_RN is None:
            assert problem.epilogue != "add"
            out_RN = x_RK.new_empty(problem.rows, problem.features)
        if bias_N is not None:
            self._library.put("MatmulDescSetAttribute", its.product, BIAS_POINTER, _address(bias_N))
        out = (_address(out_RN), its.out)
        inputs = (_address(weight_NK), its.weight, _address(x_RK), its.x, ctypes.byref(self._beta), *out, *out)
        stream = torch.cuda.current_stream(x_RK.device).cuda_stream
        workspace = (
            _address(_workspace(x_RK.device, stream)),
            ctypes.c_size_t(WORKSPACE_BYTES),
            ctypes.c_void_p(stream),
        )
        started = (self._library.handle, its.product, ctypes.byref(self._one), *inputs, ctypes.byref(self._data))
        self._library.call("Matmul", *started, *workspace)
        return out_RN


@cache
def _workspace(device: torch.device, stream: int) -> Tensor:
    """One for each stream, for good: captured steps go on using it."""
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
