"""What may come along with a request."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipelines.checkpoint import Checkpoint
from pipelines.defaults import Defaults, with_own_defaults
from pipelines.loading import SHIPPED
from pipelines.models.usual_defaults import PICTURE


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


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ('{"max_pixels": "65536"}', 'troupe.json: max_pixels is "65536"; it must be a value such as 4194304'),
        ('{"num_frames": 1.5}', "num_frames is 1.5; it must be a value such as 1"),
        ('{"takes_mask": 1}', "takes_mask is 1; it must be a value such as false"),
        ('{"max_steps": true}', "max_steps is true; it must be a value such as 100"),
        ('{"guidance_scale": null}', "guidance_scale is null; it must be a value such as 0.0"),
        ('{"max_pixels": 65536,}', "troupe.json is no JSON"),
        ("[]", "troupe.json is no JSON object"),
    ],
)
def test_what_a_folder_says_has_the_kinds_that_are_needed(written: str, told: str, tmp_path: Path) -> None:
    """Otherwise it is the first request that fails."""
    (tmp_path / "troupe.json").write_text(written)
    with pytest.raises(ValueError, match=told):
        with_own_defaults(tmp_path, PICTURE)
    (tmp_path / "troupe.json").write_text('{"guidance_scale": 3}')
    assert with_own_defaults(tmp_path, PICTURE).guidance_scale == 3.0
