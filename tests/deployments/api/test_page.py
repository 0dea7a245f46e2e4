"""The web page: nothing from elsewhere, and nothing asked for that the API does not know."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib.resources import files

import pytest

from deployments.api.bodies import ImageBody, VideoBody
from tests.deployments.api.conftest import build
from tests.deployments.fake_studio import FakeStudio

PAGE = files("deployments").joinpath("web/index.html").read_text(encoding="utf-8")


def test_nothing_comes_from_elsewhere():
    assert not re.search(r"https?://|//cdn|@import|<link|src=\"", PAGE)
    assert "innerHTML" not in PAGE  # prompts are shown as text, never as markup


def test_fields_are_those_of_the_api():
    names = set(re.findall(r'name="(\w+)"', PAGE)) - {"viewport"}
    known = set(ImageBody.model_fields) | set(VideoBody.model_fields)
    assert names - {"width", "height"} <= known
    assert {"prompt", "model", "seed", "num_inference_steps"} <= names


def test_routes_are_those_of_the_api(tmp_path):
    paths = build(FakeStudio(), tmp_path).openapi()["paths"]
    called = {path.split("?")[0] for path in re.findall(r'"(v1/[^"]*)"', PAGE)}
    assert called == {"v1/images/generations", "v1/videos", "v1/models"}
    assert all(f"/{path}" in paths for path in called)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to read the script")
def test_script_is_valid(tmp_path):
    script = tmp_path / "page.js"
    script.write_text(re.search(r"<script>(.*)</script>", PAGE, re.DOTALL)[1])
    subprocess.run(["node", "--check", script], check=True)
