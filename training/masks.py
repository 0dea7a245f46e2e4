"""The little image arithmetic that the judge needs: connected parts, growing and shrinking, sampling between pixels."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
Labels = NDArray[np.int64]


def _cross(mask: Mask) -> list[Mask]:
    """The mask and its four neighbours' values; beyond the border is False."""
    p = np.pad(mask, 1)
    return [p[1:-1, 1:-1], p[:-2, 1:-1], p[2:, 1:-1], p[1:-1, :-2], p[1:-1, 2:]]


def grown(mask: Mask, times: int) -> Mask:
    """Each time with the four neighbours of what it holds."""
    for _ in range(times):
        mask = np.logical_or.reduce(_cross(mask))
    return mask


def shrunk(mask: Mask, times: int) -> Mask:
    """Each time without what touches the outside."""
    for _ in range(times):
        mask = np.logical_and.reduce(_cross(mask))
    return mask


def _largest_in_rows(labels: Labels) -> Labels:
    """Gives each horizontal run of non-zero labels its largest one."""
    inside = labels > 0
    starts = inside.copy()
    starts[:, 1:] &= ~inside[:, :-1]
    first = np.flatnonzero(starts)
    if not len(first):
        return labels
    largest = np.maximum.reduceat(labels.ravel(), first)
    run = np.cumsum(starts.ravel()).reshape(labels.shape) - 1
    spread: Labels = np.where(inside, largest[run], 0)
    return spread


def connected(mask: Mask) -> tuple[Labels, Labels]:
    """Labels (height, width) of the parts that hang together over edges, 0 outside; and the pixels of each part."""
    labels = np.where(mask, np.arange(1, mask.size + 1).reshape(mask.shape), 0)
    while True:
        spread = _largest_in_rows(_largest_in_rows(labels).T).T
        if np.array_equal(spread, labels):
            break
        labels = spread
    numbers = np.searchsorted(np.unique(labels[mask]), labels) + 1
    numbers = np.where(mask, numbers, 0)
    return numbers, np.bincount(numbers.ravel())[1:]


def sample(image: Floats, rows: Floats, columns: Floats) -> Floats:
    """Bilinear values between pixels; outside the image 0."""
    height, width = image.shape
    inside = (rows >= 0) & (rows <= height - 1) & (columns >= 0) & (columns <= width - 1)
    rows, columns = np.where(inside, rows, 0), np.where(inside, columns, 0)
    top, left = rows.astype(int), columns.astype(int)
    down, right = rows - top, columns - left
    below, beside = np.minimum(top + 1, height - 1), np.minimum(left + 1, width - 1)
    upper = image[top, left] * (1 - right) + image[top, beside] * right
    lower = image[below, left] * (1 - right) + image[below, beside] * right
    values: Floats = (upper * (1 - down) + lower * down) * inside
    return values


def centre(weights: Floats) -> tuple[float, float]:
    """Row and column of the centre of mass."""
    total = weights.sum()
    rows, columns = np.arange(weights.shape[0]), np.arange(weights.shape[1])
    return float(weights.sum(1) @ rows / total), float(weights.sum(0) @ columns / total)
