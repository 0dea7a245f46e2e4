"""Values with tensors, in a form that processes without torch can forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""Shapes of tensors by name: hashable."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parcel:
    """A packed value, usable without torch. Ray stores its bytes in the object store and reads them without a copy.

    Processes send parcels, not references to their own objects. Ray loses a reference in a stream's item if the
    owner's query reaches the reader before the reader has requested the item.
    """

    skeleton: bytes
    """Pickle of the value, with a place for each tensor."""
    message: NDArray[np.uint8]
    """uint8 (N,), the tensors' bytes."""

    @classmethod
    def of(cls, value: Any, **fields: Any) -> Self:
        """Pack ``value``, whose tensors lie on the CPU; ``fields`` are a subclass's own."""
        import torch

        from engines.core.packing import joined, pack

        cpu = torch.device("cpu")
        skeleton, tensors = pack(value, cpu)
        return cls(skeleton=skeleton, message=joined(tensors, cpu).numpy(), **fields)

    def open(self) -> Any:
        """Return the value; its tensors share one copy of the bytes, since the object store is read-only."""
        import torch

        from engines.core.packing import unpack

        return unpack(self.skeleton, torch.from_numpy(self.message.copy()))
