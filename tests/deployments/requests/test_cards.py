"""The model for so many pictures."""

from __future__ import annotations

import pytest

from deployments.requests.cards import choose_card
from deployments.requests.errors import RequestError
from tests.deployments.support.fake_studio import FakeStudio

CARDS = FakeStudio(takes_pictures=True).cards()


@pytest.mark.parametrize(
    ("kind", "num_pictures", "name"),
    [
        ("image", 0, "fake-pictures"),
        ("image", 1, "fake-edits"),
        ("image", 3, "fake-edits"),
        ("image", 4, "fake-edits"),
        ("video", 0, "fake-clips"),
        ("video", 1, "fake-begun-clips"),
    ],
)
def test_without_a_name_a_model_for_the_pictures_is_taken(kind: str, num_pictures: int, name: str) -> None:
    assert choose_card(CARDS, None, kind, num_pictures).name == name  # type: ignore[arg-type]
    assert choose_card(CARDS, "fake-pictures", "image", num_pictures).name == "fake-pictures"
    with pytest.raises(RequestError):
        choose_card({}, None, "image", num_pictures)
