"""What may come along with a request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pipelines.checkpoint import Checkpoint
from pipelines.defaults import Defaults
from pipelines.loading import SHIPPED


@pytest.fixture
def words_alone() -> Defaults:
    return replace(Checkpoint(SHIPPED / "flux-shapes").defaults, max_pictures=0, takes_strength=False)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"num_pictures": 1}, "takes words alone"),
        ({"has_mask": True}, "takes a mask never"),
        ({"strength": 0.5}, "takes strength never"),
    ],
)
def test_a_model_of_words_takes_nothing_else(words_alone: Defaults, given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        words_alone.request(**given)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"num_pictures": 0}, "0 pictures came along; this model takes from 1 to 3"),
        ({"num_pictures": 4}, "4 pictures came along; this model takes from 1 to 3"),
        ({"num_pictures": 1, "strength": 0.0}, "strength is 0.0; it must be above 0"),
        ({"num_pictures": 1, "strength": 1.1}, "strength is 1.1; it must be above 0"),
    ],
)
def test_an_editor_takes_what_it_can_use(words_alone: Defaults, given: dict[str, Any], told: str) -> None:
    editor = replace(words_alone, min_pictures=1, max_pictures=3, takes_mask=True, takes_strength=True)
    assert editor.request(num_pictures=3, has_mask=True, strength=1.0).num_pictures == 3
    with pytest.raises(ValueError, match=told):
        editor.request(**given)
