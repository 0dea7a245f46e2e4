"""The judge's assumptions on `scipy.ndimage` hold, each against a slow reading of its definition."""

from typing import Any

import numpy as np
import pytest
from scipy import ndimage

from training.judge import Mask

STEPS = ((0, 1), (0, -1), (1, 0), (-1, 0))


def _masks() -> list[Mask]:
    generator = np.random.default_rng(0)
    masks = [generator.random(generator.integers(1, 14, 2)) < generator.random() for _ in range(40)]
    return [*masks, np.zeros((3, 4), bool), np.ones((4, 3), bool)]


def _neighbours(mask: Mask, row: int, column: int) -> list[bool]:
    height, width = mask.shape
    places = [(row + dy, column + dx) for dy, dx in STEPS]
    return [bool(mask[y, x]) if 0 <= y < height and 0 <= x < width else False for y, x in places]


def _flood(mask: Mask, row: int, column: int) -> set[tuple[int, int]]:
    part, edge = set(), [(row, column)]
    while edge:
        y, x = edge.pop()
        inside = 0 <= y < mask.shape[0] and 0 <= x < mask.shape[1] and mask[y, x]
        if inside and (y, x) not in part:
            part.add((y, x))
            edge += [(y + dy, x + dx) for dy, dx in STEPS]
    return part


def _parts(labels: Any) -> set[frozenset[tuple[int, int]]]:
    parts = (np.argwhere(labels == number) for number in range(1, labels.max(initial=0) + 1))
    return {frozenset((int(y), int(x)) for y, x in part) for part in parts}


def test_connected_parts_are_those_of_a_flood_fill() -> None:
    for mask in _masks():
        labels, num_parts = ndimage.label(mask)
        expected = {frozenset(_flood(mask, y, x)) for y, x in np.argwhere(mask).tolist()}
        assert _parts(labels) == expected
        assert num_parts == len(expected)
        assert sorted(np.bincount(labels.ravel())[1:]) == sorted(len(part) for part in expected)
        assert ((labels > 0) == mask).all()


def test_a_spiral_is_one_part() -> None:
    mask = np.zeros((15, 15), bool)
    for turn in range(0, 7, 2):
        mask[turn, turn : 15 - turn] = mask[turn : 15 - turn, 14 - turn] = mask[14 - turn, turn : 15 - turn] = True
        mask[turn + 2 : 15 - turn, turn] = True
        mask[turn + 2, turn : turn + 2] = True
    assert ndimage.label(mask)[1] == 1


def test_growing_and_shrinking_ask_the_four_neighbours() -> None:
    for mask in _masks():
        for row, column in np.ndindex(mask.shape):
            around = [bool(mask[row, column]), *_neighbours(mask, row, column)]
            assert ndimage.binary_dilation(mask)[row, column] == any(around)
            assert ndimage.binary_erosion(mask)[row, column] == all(around)
        for change in (ndimage.binary_dilation, ndimage.binary_erosion):
            assert (change(mask, iterations=2) == change(change(mask))).all()


def test_sampling_between_pixels() -> None:
    rows, columns = np.mgrid[0:4, 0:5].astype(float)
    plane = 2 * rows + 3 * columns + 1
    at = np.array([0.0, 1.5, 2.25, 3.0]), np.array([0.0, 0.5, 3.75, 4.0])
    np.testing.assert_allclose(ndimage.map_coordinates(plane, at, order=1), 2 * at[0] + 3 * at[1] + 1)
    outside = np.array([-0.1, 3.1, 1.0]), np.array([1.0, 1.0, 4.2])
    assert (ndimage.map_coordinates(plane, outside, order=1) == 0).all()


def test_centre_of_mass() -> None:
    weights = np.zeros((5, 7))
    weights[1, 2], weights[3, 6] = 3.0, 1.0
    assert ndimage.center_of_mass(weights) == pytest.approx((1.5, 3.0))
