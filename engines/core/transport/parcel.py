"""Values with tensors on their way through processes that know nothing of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""What tensors there are, by name: hashable."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parcel:
    """A packed value. Who holds one needs no torch; Ray leaves its bytes in the object store and copies none to read.

    Parcels are what processes send to each other in place of references to objects that they own: a reference inside an
    item of a stream is lost when its owner asks the reader for it before the reader has asked for the item.
    """

    skeleton: bytes
    message: NDArray[np.uint8]

    @classmethod
    def of(cls, value: Any, **fields: Any) -> Self:
        """Packs ``value``, whose tensors lie on the CPU; ``fields`` are those that a subclass has besides."""
        import torch

        from engines.core.transport.packing import joined, pack

        cpu = torch.device("cpu")
        skeleton, tensors = pack(value, cpu)
        return cls(skeleton=skeleton, message=joined(tensors, cpu).numpy(), **fields)

    def open(self) -> Any:
        """Returns the value; its tensors share one copy of the bytes, since those in the object store are read-only."""
        import torch

        from engines.core.transport.packing import unpack

        return unpack(self.skeleton, torch.from_numpy(self.message.copy()))
