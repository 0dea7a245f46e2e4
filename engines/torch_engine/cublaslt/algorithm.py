"""An algorithm of cuBLASLt by its settings."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from engines.torch_engine.cublaslt.library import (
    CAN_TILES,
    CLUSTER,
    OPTION,
    STAGES,
    TILE,
    TYPES,
    AlgorithmData,
    CublasLt,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm:
    """In cuBLASLt's numbers: the kernel family, its tile, stages, cluster of thread blocks and the family's own option.

    The inner dimension is never split: sums are made in one order.
    """

    family: int
    tile: int
    stages: int
    cluster: int
    option: int

    def data(self, library: CublasLt) -> AlgorithmData:
        """Raises CublasLtError if the library does not know the family or a setting."""
        data = _of_family(self.family, library)
        for attribute, value in (
            (TILE, ctypes.c_uint32(self.tile)),
            (STAGES, ctypes.c_uint32(self.stages)),
            (CLUSTER, ctypes.c_uint16(self.cluster)),
            (OPTION, ctypes.c_uint32(self.option)),
        ):
            library.put("MatmulAlgoConfigSetAttribute", ctypes.byref(data), attribute, value)
        return data


def tiles_of(family: int, library: CublasLt) -> list[int]:
    """All that it has; cuBLASLt divides by zero where it is asked for another."""
    data, size_bytes = _of_family(family, library), ctypes.c_size_t()
    question = (ctypes.byref(data), CAN_TILES)
    library.call("MatmulAlgoCapGetAttribute", *question, None, ctypes.c_size_t(0), ctypes.byref(size_bytes))
    tiles = (ctypes.c_uint32 * (size_bytes.value // 4))()
    library.call("MatmulAlgoCapGetAttribute", *question, tiles, size_bytes, ctypes.byref(size_bytes))
    return list(tiles)


def _of_family(family: int, library: CublasLt) -> AlgorithmData:
    data = AlgorithmData()
    library.call("MatmulAlgoInit", library.handle, *TYPES, family, ctypes.byref(data))
    return data
