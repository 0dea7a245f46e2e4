"""The OpenAPI document is complete. ``routes/test_every_route.py`` shows that the routes do what it says."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deployments.http.conftest import build
from tests.deployments.support.fake_service import FakeService

DOCUMENT = build(FakeService(), Path("unused")).openapi()


def test_document_is_complete() -> None:
    paths = set(DOCUMENT["paths"])
    assert {"/health", "/v1/models", "/v1/images/generations", "/v1/videos", "/v1/videos/{video_id}/content"} <= paths
    assert all(operation["description"] and "422" not in operation["responses"] for operation in operations())
    text = str(DOCUMENT)
    for name in DOCUMENT["components"]["schemas"]:
        assert f"#/components/schemas/{name}'" in text, name


@pytest.mark.parametrize("name", ["ImageBody", "EditBody", "VideoBody", "Defaults", "SolverLimits", "StageTimes"])
def test_fields_are_described(name: str) -> None:
    fields = DOCUMENT["components"]["schemas"][name]["properties"]
    assert [field for field, schema in fields.items() if not schema.get("description")] == []


def operations() -> list[dict[str, Any]]:
    return [operation for path in DOCUMENT["paths"].values() for operation in path.values()]


def test_events_are_referenced() -> None:
    """In the order of ``event``'s names, each schema's ``type`` is one or more of them."""
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


async def test_document_over_http(client: httpx.AsyncClient) -> None:
    assert (await client.get("/openapi.json")).json() == DOCUMENT
