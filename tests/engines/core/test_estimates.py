"""Step times are estimated between the numbers of tokens that the cost model priced, and beyond them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engines.core.estimates import StepEstimates

ESTIMATES = StepEstimates(
    tokens=(100, 200, 400),
    by_size={1: ((0.1, 0.2, 0.8), (0.2, 0.4, 1.6)), 2: ((0.06, 0.1, 0.4), (0.1, 0.2, 0.8))},
)


@pytest.mark.parametrize(
    ("num_tokens", "num_branches", "expected"),
    [
        (200, 1, {1: 0.2, 2: 0.1}),
        (400, 2, {1: 1.6, 2: 0.8}),
        (200 * 2**0.5, 1, {1: 0.4, 2: 0.2}),
        (800, 1, {1: 3.2, 2: 1.6}),
        (50, 1, {1: 0.05, 2: 0.036}),
        (200, 6, {1: 1.2, 2: 0.6}),
    ],
)
def test_times_grow_as_a_power_of_the_tokens(num_tokens: float, num_branches: int, expected: dict[int, float]) -> None:
    """The cases are a priced number, one between two, ones beyond both ends, and more branches."""
    assert ESTIMATES.step_s(num_tokens, num_branches) == pytest.approx(expected)


def test_what_is_written_is_read_again() -> None:
    assert StepEstimates.of_document(json.loads(json.dumps(ESTIMATES.to_document()))) == ESTIMATES


@pytest.mark.parametrize(
    "document",
    [
        {},
        [],
        {"tokens": [1, 2], "by_size": {}},
        {"tokens": [1], "by_size": {"1": [[0.1]]}},
        {"tokens": [1, 2], "by_size": {"1": [[0.1]]}},
        {"tokens": [1, 2], "by_size": {"one": [[0.1, 0.2]]}},
    ],
)
def test_what_is_no_estimate(document: Any) -> None:
    with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
        StepEstimates.of_document(document)
