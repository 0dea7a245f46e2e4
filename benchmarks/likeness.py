"""How alike two pictures or clips are, by scikit-image."""

from __future__ import annotations

from statistics import mean
from typing import Any

import numpy as np
from numpy.typing import NDArray
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

IDENTICAL_DB = 99.0
"""In place of infinity."""
Pixels = NDArray[np.uint8]
"""(height, width, 3), of clips with frames before it."""


def psnr_db(given: NDArray[Any], expected: NDArray[Any], peak: float | None = None) -> float:
    """Returns the peak signal-to-noise ratio of all pixels; of other values than these, ``peak`` is theirs."""
    if np.array_equal(given, expected):
        return IDENTICAL_DB
    return float(peak_signal_noise_ratio(expected, given, data_range=peak))  # type: ignore[no-untyped-call]


def ssim(given_FHWC: Pixels, expected_FHWC: Pixels) -> float:
    """Returns the structural similarity (Wang et al. 2004, doi:10.1109/TIP.2003.819861), the mean over the frames."""
    pairs = zip(given_FHWC, expected_FHWC, strict=True)
    return mean(float(structural_similarity(*pair, channel_axis=-1)) for pair in pairs)  # type: ignore[no-untyped-call]
