"""docs/use and docs/operate/monitoring.md name every route, field, event, error and metric."""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from deployments.clips.clips import Clips
from deployments.clips.settings import ClipSettings
from deployments.door.answers import ANSWERS
from deployments.http.app import create_api
from deployments.http.openapi_text import CODES
from deployments.http.settings import ApiSettings
from tests.deployments.support.fake_service import FakeService
from tests.support.fenced import ROOT

FILES = (*sorted((ROOT / "docs" / "use").glob("*.md")), ROOT / "docs" / "operate" / "monitoring.md")
TEXT = "\n".join(path.read_text() for path in FILES)
UNSAID = {"type"}
"""Fields that the text explains for all events at once."""


def words_in_code() -> set[str]:
    """Return the words in backticks or fenced blocks; ``GET /v1/videos`` gives the route as a word, too."""
    code = chain(re.findall(r"```\w+\n(.*?)```", TEXT, re.DOTALL), re.findall(r"`([^`\n]+)`", TEXT))
    return {word for text in code for word in re.findall(r"[\w./{}-]+", text)}


@cache
def openapi() -> dict[str, Any]:
    service, folder = FakeService(), Path("nowhere")
    clips = Clips(service, ClipSettings(data_dir=folder))
    return create_api(service, ApiSettings(data_dir=folder), clips).openapi()


def test_every_route_is_described() -> None:
    described = {(method, path) for method, path in re.findall(r"`(GET|POST|DELETE) (/[\w/{}]*)`", TEXT)}
    routes = {(method.upper(), path) for path, methods in openapi()["paths"].items() for method in methods}
    # The path of a model may contain slashes, like hub ids.
    assert described >= {(method, path.replace("{model:path}", "{model}")) for method, path in routes}
    assert described <= routes | {("GET", "/v1/models/{model}")}


def test_every_field_is_described() -> None:
    fields = {name for schema in openapi()["components"]["schemas"].values() for name in schema.get("properties", {})}
    assert fields - UNSAID - words_in_code() == set()


def test_every_event_is_described() -> None:
    methods = [method for path in openapi()["paths"].values() for method in path.values()]
    answers = (method["responses"]["200"] for method in methods if "200" in method["responses"])
    streams = (answer["content"]["text/event-stream"] for answer in answers if "text/event-stream" in str(answer))
    events = {name for stream in streams for name in stream["schema"]["properties"]["event"]["enum"]}
    assert {"image_generation.completed", "video.completed"} <= events
    assert events - words_in_code() == set()


@pytest.mark.parametrize(
    ("pattern", "source"),
    [
        (r'code="([a-z_]+)"|"((?:missing|invalid)_api_key)"', "deployments"),
        (r'"(troupe_[a-z_]+)",', "engines/gang/metrics.py"),
        (r'"(troupe_[a-z_]+)",', "deployments/observability/metrics.py"),
    ],
)
def test_every_name_in_the_source_is_described(pattern: str, source: str) -> None:
    files = [ROOT / source] if source.endswith(".py") else (ROOT / source).rglob("*.py")
    named = {group for file in files for groups in re.findall(pattern, file.read_text()) for group in aslist(groups)}
    assert len(named) > 1
    assert named - words_in_code() == set()


def test_errors_are_those_of_the_openapi_document() -> None:
    described: defaultdict[int, set[str]] = defaultdict(set)
    for status, codes in re.findall(r"^\| (\d{3}) \| ([`\w, ]+) \|", TEXT, re.MULTILINE):
        described[int(status)] |= set(re.findall(r"\w+", codes))
    doors = {answer.code for answer in ANSWERS}
    for status, codes in CODES.items():
        assert {*codes} <= described[status] <= {*codes} | doors, status


def aslist(groups: str | tuple[str, ...]) -> list[str]:
    return [groups] if isinstance(groups, str) else [group for group in groups if group]
