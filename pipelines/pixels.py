"""The bytes of frames from a decoder's values in [-1, 1]."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_unit_range(pixels: Tensor) -> Tensor:
    """Float32 in [0, 1] on the CPU, rounded in the decoder's own dtype first, as diffusers does."""
    return (pixels * 0.5 + 0.5).clamp(0, 1).float().cpu()


def to_frames(pixels_FCHW: Tensor) -> NDArray[np.uint8]:
    """Frames as uint8 (frames, height, width, 3) from ``pixels_FCHW`` in [-1, 1]."""
    unit_FHWC = to_unit_range(pixels_FCHW).permute(0, 2, 3, 1)
    frames: NDArray[np.uint8] = (unit_FHWC * 255).round().to(torch.uint8).numpy()
    return frames
