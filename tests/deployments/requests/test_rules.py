"""Rules of a model: the fields that they blame."""

from __future__ import annotations

import pytest

from deployments.requests.bodies import EditBody, MediaBody, VideoBody
from deployments.requests.rules import _body_field
from pipelines.defaults import Defaults
from tests.deployments.support.fake_studio import BOTH, CLIPS, EDITS, LAYERS


@pytest.mark.parametrize(
    ("defaults", "body"),
    [
        (EDITS, EditBody(prompt="a")),
        (LAYERS, EditBody()),
        (CLIPS, VideoBody(prompt="a")),
        (BOTH, VideoBody(prompt="a")),
    ],
)
def test_every_check_of_a_model_blames_a_field_of_the_api(defaults: Defaults, body: MediaBody) -> None:
    """A check that is added later, too."""
    known = set(EditBody.model_fields) | set(VideoBody.model_fields)
    fields = [_body_field(name, body) for name, _ in defaults.checks(defaults.request())]
    assert len(fields) == len(set(fields)) > 8
    assert set(fields) <= known


def test_a_size_is_blamed_by_the_name_that_was_used() -> None:
    assert _body_field("width", EditBody(size="64x64")) == "size"
    assert _body_field("width", EditBody(width=64, height=64)) == "width"
