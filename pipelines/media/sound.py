"""The sound of a clip."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Sound:
    samples_CT: NDArray[np.float32]
    """One or two channels, in [-1, 1]."""
    rate: int
    """Samples a second."""

    def __post_init__(self) -> None:
        channels = self.samples_CT.shape[0]
        if self.samples_CT.ndim != 2 or channels not in (1, 2):
            raise ValueError(f"sound of the shape {self.samples_CT.shape}; (1 or 2 channels, samples) is allowed")
