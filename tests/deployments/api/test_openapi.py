"""The OpenAPI document says what the API does: schemathesis finds no 5xx, and no answer that is not documented."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import positive_data_acceptance

from tests.deployments.api.conftest import build, serving
from tests.deployments.support.fake_studio import FakeStudio

KEY = "key"
DOCUMENT = build(FakeStudio(), Path("unused")).openapi()
schema = schemathesis.openapi.from_dict(DOCUMENT)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(build(FakeStudio(step_s=0), tmp_path_factory.mktemp("data"), api_keys=(KEY,))) as url:
        yield url


@schema.parametrize()
@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_no_answer_surprises(case: schemathesis.Case, server: str) -> None:
    case.call_and_validate(
        base_url=server,
        headers={"Authorization": f"Bearer {KEY}"},
        # Sizes and steps depend on the model: what suits the document may still be refused, with a 400 that says why.
        excluded_checks=[positive_data_acceptance],
        timeout=10,
    )


def test_document_is_complete() -> None:
    paths = set(DOCUMENT["paths"])
    assert {"/health", "/v1/models", "/v1/images/generations", "/v1/videos", "/v1/videos/{video_id}/content"} <= paths
    operations = [operation for path in DOCUMENT["paths"].values() for operation in path.values()]
    assert all(operation["description"] and "422" not in operation["responses"] for operation in operations)
    text = str(DOCUMENT)
    for name in DOCUMENT["components"]["schemas"]:
        assert f"#/components/schemas/{name}" in text or name in EVENTS


EVENTS = {"PartialImage", "CompletedImage", "StepProgress", "VideoEvent"}


def test_document_over_http(server: str) -> None:
    assert httpx.get(f"{server}/openapi.json").json() == DOCUMENT
