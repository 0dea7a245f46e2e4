"""Which algorithm a product takes here."""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor

from engines.torch_engine.cublaslt.algorithm import Algorithm
from engines.torch_engine.cublaslt.library import CublasLt, CublasLtError
from engines.torch_engine.cublaslt.matmul import Matmul
from engines.torch_engine.cublaslt.problem import Epilogue, Problem
from engines.torch_engine.cublaslt.table import table_of

logger = logging.getLogger(__name__)

ALIGNED_BYTES = 16
"""What tensor memory access asks of addresses; 256 is what PyTorch's own allocations have."""


def recorded_matmul(x_RK: Tensor, weight_NK: Tensor, epilogue: Epilogue, *others: Tensor | None) -> Matmul | None:
    """None, and the product is PyTorch's, if nothing was recorded, or the matrices do not lie as it was recorded.

    ``others``: the other tensors of the product (bias, output), if there are.
    """
    tensors = (x_RK, weight_NK, *(other for other in others if other is not None))
    if not x_RK.is_cuda or not all(_fits(tensor) for tensor in tensors):
        return None
    rows, inner = x_RK.shape
    return _matmul(x_RK.device, Problem(rows=rows, features=weight_NK.shape[0], inner=inner, epilogue=epilogue))


def _fits(tensor: Tensor) -> bool:
    aligned = tensor.data_ptr() % ALIGNED_BYTES == 0
    return aligned and tensor.dtype == torch.bfloat16 and tensor.is_contiguous()


@cache
def _matmul(device: torch.device, problem: Problem) -> Matmul | None:
    algorithm = _algorithms(device).get(problem)
    if algorithm is None:
        return None
    try:
        return Matmul(problem, algorithm, _library(device))
    except CublasLtError as error:  # the library's own choice is always there
        logger.warning("the algorithm recorded for %s is not taken: %s", problem, error)
        return None


@cache
def _algorithms(device: torch.device) -> dict[Problem, Algorithm]:
    gpu = torch.cuda.get_device_name(device)
    table = table_of(gpu)
    if table is None:
        return {}
    version = _library(device).version
    if version != table.version:
        logger.warning(
            "algorithms were recorded with cuBLASLt %s, this is %s: its own are taken", table.version, version
        )
        return {}
    return table.algorithms


@cache
def _library(device: torch.device) -> CublasLt:
    with torch.cuda.device(device):
        return CublasLt()
