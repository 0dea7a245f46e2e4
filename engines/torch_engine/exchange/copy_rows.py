"""Rows from one memory of a GPU's reach to another by a copy engine, which leaves the multiprocessors alone."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from engines.fast.side_streams import SideStream
from engines.parallel.communication.collectives import Axis

_ANY_DIRECTION = 4  # cudaMemcpyDefault: the addresses tell


def copy_streams(axis: Axis, device: torch.device, *, to_self: bool) -> dict[int, SideStream]:
    """A stream to each other rank, from the right-hand neighbour on, so that no rank is written to by all at once; with
    ``to_self`` one more, the last, to this rank."""
    turns = (*range(1, axis.size), *[0] * to_self)
    return {(axis.index + turn) % axis.size: SideStream(device, f"copies {turn}") for turn in turns}


def copy_rows(target_RC: Tensor, source_RC: Tensor) -> None:
    """Copy rows on the current stream; columns lie side by side in both, rows at any distance.

    ``Tensor.copy_`` calls a copy engine for whole tensors alone, and starts a kernel for anything with gaps.
    """
    assert target_RC.shape == source_RC.shape, (target_RC.shape, source_RC.shape)
    assert target_RC.dtype == source_RC.dtype, (target_RC.dtype, source_RC.dtype)
    assert target_RC.stride(1) == source_RC.stride(1) == 1, (target_RC.stride(), source_RC.stride())
    if source_RC.device.type != "cuda":
        target_RC.copy_(source_RC)
        return
    rows, columns = source_RC.shape
    size = source_RC.element_size()
    target = ctypes.c_void_p(target_RC.data_ptr()), ctypes.c_size_t(target_RC.stride(0) * size)
    source = ctypes.c_void_p(source_RC.data_ptr()), ctypes.c_size_t(source_RC.stride(0) * size)
    extent = ctypes.c_size_t(columns * size), ctypes.c_size_t(rows)
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    code = _runtime().cudaMemcpy2DAsync(*target, *source, *extent, _ANY_DIRECTION, stream)
    if code:
        raise RuntimeError(f"cudaMemcpy2DAsync of {rows} rows of {columns * size} bytes failed with code {code}")


def copy_heads(target_BLHD: Tensor, source_BLHD: Tensor) -> None:
    """``copy_rows`` of what has its heads side by side, in both."""
    for target_LHD, source_LHD in zip(target_BLHD, source_BLHD, strict=True):
        copy_rows(target_LHD.flatten(1), source_LHD.flatten(1))


@cache
def _runtime() -> Any:
    """The CUDA runtime that PyTorch has loaded."""
    assert torch.version.cuda is not None
    return ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
