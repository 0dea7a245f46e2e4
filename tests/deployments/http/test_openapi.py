"""The OpenAPI document says what the API does: schemathesis finds no 5xx, and no answer that is not documented."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import positive_data_acceptance

from pipelines.lora.source import LoraLimits
from tests.deployments.http.conftest import build, serving
from tests.deployments.support.fake_studio import FakeStudio
from tests.support.patience import PATIENCE_S

KEY = "key"
DOCUMENT = build(FakeStudio(), Path("unused")).openapi()
schema = schemathesis.openapi.from_dict(DOCUMENT)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    studio = FakeStudio(step_s=0, takes_pictures=True, runtime_loras=LoraLimits())
    with serving(build(studio, tmp_path_factory.mktemp("data"), api_keys=(KEY,))) as url:
        yield url


ALL_OF, ONE_IN = 60, 8
"""Boundary values of schemathesis that are all sent for an operation, and the step through the others: six bodies have
8,000. Operations whose bodies have the same fields send different ones."""
OPERATIONS = [f"{method.upper()} {path}" for path, one in DOCUMENT["paths"].items() for method in one]
NUMBERS: Counter[str] = Counter()
"""Boundary values so far, by operation."""
FEW = settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@schema.parametrize()
@FEW
def test_no_answer_surprises(case: schemathesis.Case[Any], server: str) -> None:
    if is_boundary(case):
        NUMBERS[case.operation.label] += 1
        number = NUMBERS[case.operation.label]
        if number > ALL_OF and (number + OPERATIONS.index(case.operation.label)) % ONE_IN:
            return
    call(case, server)


@pytest.mark.slow
@schema.parametrize()
@FEW
def test_no_boundary_value_surprises(case: schemathesis.Case[Any], server: str) -> None:
    if is_boundary(case):
        call(case, server)


def is_boundary(case: schemathesis.Case[Any]) -> bool:
    """True for a case of schemathesis's phase "coverage": one field at a time has a value of interest."""
    return case.meta is not None and case.meta.phase.name == "coverage"


def call(case: schemathesis.Case[Any], server: str) -> None:
    case.call_and_validate(
        base_url=server,
        headers={"Authorization": f"Bearer {KEY}"},
        # Sizes and steps depend on the model: what suits the document may still be refused, with a 400 that says why.
        excluded_checks=[positive_data_acceptance],
        timeout=PATIENCE_S,
    )


def test_document_is_complete() -> None:
    paths = set(DOCUMENT["paths"])
    assert {"/health", "/v1/models", "/v1/images/generations", "/v1/videos", "/v1/videos/{video_id}/content"} <= paths
    assert all(operation["description"] and "422" not in operation["responses"] for operation in operations())
    text = str(DOCUMENT)
    for name in DOCUMENT["components"]["schemas"]:
        assert f"#/components/schemas/{name}'" in text, name


def operations() -> list[dict[str, Any]]:
    return [operation for path in DOCUMENT["paths"].values() for operation in path.values()]


def test_events_are_referenced() -> None:
    """In the order of the names that ``event`` may have, each schema's ``type`` is one or more of them."""
    contents = [operation["responses"].get("200", {}).get("content", {}) for operation in operations()]
    streams = [content["text/event-stream"]["schema"] for content in contents if "text/event-stream" in content]
    assert len(streams) == 3
    for stream in streams:
        choices = [one["$ref"].rsplit("/", 1)[1] for one in stream["properties"]["data"]["contentSchema"]["oneOf"]]
        types = [DOCUMENT["components"]["schemas"][name]["properties"]["type"] for name in choices]
        names = {name for one in types for name in one.get("enum", [one.get("const")])}
        assert names == set(stream["properties"]["event"]["enum"])


def test_errors_headers_and_the_optional_key_are_described() -> None:
    for operation in operations():
        responses = operation["responses"]
        assert {"405", "500"} <= set(responses)
        assert all("X-Request-Id" in response["headers"] for response in responses.values())
        for status, response in responses.items():
            if int(status) >= 400 and "Health" not in str(response):
                assert "`code`: `" in response["description"], status
        for status, header in (("401", "WWW-Authenticate"), ("405", "Allow"), ("429", "Retry-After")):
            assert status not in responses or header in responses[status]["headers"]
        assert "401" not in responses or operation["security"] == [{}, {"HTTPBearer": []}]
    content = DOCUMENT["paths"]["/v1/videos/{video_id}/content"]["get"]["responses"]
    assert {"ETag", "Last-Modified"} <= set(content["200"]["headers"])
    assert "304" in content


def test_every_code_in_the_source_is_described() -> None:
    files = Path(str(resources.files("deployments"))).rglob("*.py")
    named = {code for file in files for code in re.findall(r'code="([a-z_]+)"', file.read_text())}
    assert {"queue_full", "video_not_ready"} <= named
    assert {code for code in named if f"`{code}`" not in str(DOCUMENT)} == set()


def test_document_over_http(server: str) -> None:
    assert httpx.get(f"{server}/openapi.json", timeout=PATIENCE_S).json() == DOCUMENT
