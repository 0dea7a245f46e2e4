"""The web page loads nothing from elsewhere, and requests only what the API knows."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import httpx
import pytest

from deployments.requests.bodies import EditBody, VideoBody
from pipelines.defaults import Defaults
from tests.deployments.http.conftest import build
from tests.deployments.http.support.browser import ASSETS, PAGE, SCRIPT, WEB, Form, needs_node, run_page
from tests.deployments.support.fake_service import BEGUN_CLIPS, CLIPS, EDITS, LAYERS, PICTURES, FakeService


def test_nothing_comes_from_elsewhere() -> None:
    written = PAGE + SCRIPT + (WEB / "page/page.css").read_text(encoding="utf-8")
    assert not re.search(r"https?://|//cdn|@import|url\(", written)
    assert "innerHTML" not in written  # prompts are shown as text, never as markup
    assert set(ASSETS) == {f"page/{file.name}" for file in (WEB / "page").iterdir()}


async def test_its_files_are_served_beside_it(client: httpx.AsyncClient) -> None:
    page = await client.get("/")
    policy = page.headers["content-security-policy"]
    assert "unsafe-inline" not in policy
    assert policy.count("'sha256-") == page.text.count("<script>") == 1
    types = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}
    for name in ASSETS:
        answer = await client.get(f"/{name}")
        assert (answer.status_code, answer.headers["content-type"]) == (200, types[name.rpartition(".")[2]])
        again = await client.get(f"/{name}", headers={"If-None-Match": answer.headers["etag"]})
        assert again.status_code == 304, "a browser asks whether it is still the same"
    for name in ("index.html", "..%2Findex.html", "server.py"):
        assert (await client.get(f"/page/{name}")).status_code == 404


def test_fields_are_those_of_the_api() -> None:
    names = set(re.findall(r'name="(\w+)"', PAGE)) - {"viewport"}
    known = set(EditBody.model_fields) | set(VideoBody.model_fields)
    assert names - {"width", "height"} <= known
    assert {"prompt", "model", "seed", "num_inference_steps"} <= names


def test_routes_are_those_of_the_api(tmp_path: Path) -> None:
    paths = build(FakeService(), tmp_path).openapi()["paths"]
    called = {path.split("?")[0] for path in re.findall(r'"(v1/[^"]*)"', SCRIPT)}
    assert called == {"v1/images/generations", "v1/images/edits", "v1/videos", "v1/models", "v1/loras"}
    assert all(f"/{path}" in paths for path in called)


@needs_node
def test_script_is_valid(tmp_path: Path) -> None:
    script = tmp_path / "page.js"
    script.write_text(SCRIPT)
    subprocess.run(["node", "--check", script], check=True)


@needs_node
@pytest.mark.parametrize(
    "defaults", [PICTURES, CLIPS, EDITS, BEGUN_CLIPS], ids=["pictures", "clips", "edits", "begun clips"]
)
def test_a_browser_lets_the_defaults_of_a_model_be_sent(tmp_path: Path, defaults: Defaults) -> None:
    """A browser does not send a form with a value out of range, even hidden; a disabled field does not count."""
    form = Form()
    assert {form.fields[name]["kind"] for name in ("fps", "n", "prompt")} == {"video", "image", None}
    fields = run_page(tmp_path, "console.log(JSON.stringify(fields));", defaults)
    fields = {name: field for name, field in fields.items() if not field.get("disabled")}
    numbers = {name: field for name, field in fields.items() if field.get("type") == "number" and field["value"] != ""}
    assert {"width", "height", "num_inference_steps"} < set(numbers)
    assert ("fps" in numbers) == (defaults.kind == "video")
    assert ("guidance_scale" in fields) == (defaults.guidance_scale > 0)  # the other models have only true_cfg_scale
    taken = {"image": defaults.max_pictures > 0, "mask": defaults.takes_mask, "strength": defaults.takes_strength}
    assert {name: name in fields for name in taken} == taken
    for name, field in numbers.items():
        low, high = (float(field.get(end) or default) for end, default in (("min", "-inf"), ("max", "inf")))
        assert low <= float(field["value"]) <= high, name


DRAW = """
const made = [], errors = [];
makeCard = () => {
  const seen = [];
  made.push({ stop: {}, seen, node: { remove: () => seen.push("gone") } });
  return made.at(-1);
};
showError = (message) => errors.push(message);
gallery.prepend = () => {};
post = async () => {};
showPictureEvent = (card, event) => card.seen.push(event.name);
serverSentEvents = async function* () { yield* EVENTS; };
const show = () => console.log(JSON.stringify([made.map((card) => card.seen), errors]));
drawPictures({ prompt: "", model: "m", n: 2 }, [1]).then(show);
"""


@needs_node
def test_each_layer_has_a_card(tmp_path: Path) -> None:
    """All layers' cards show their picture's events; a missing layer is noticed."""
    progress = [{"type": "troupe.progress", "image_index": index, "name": f"step of {index}"} for index in (1, 0)]
    layers = [
        {"type": "image_edit.completed", "image_index": index, "layer": layer, "name": f"{index}.{layer}"}
        for index, layer in ((1, 0), (1, 1), (0, 1))
    ]
    seen = run_page(tmp_path, DRAW.replace("EVENTS", json.dumps([*progress, *layers])), LAYERS)
    cards = [["step of 0", "gone"], ["step of 0", "0.1"], ["step of 1", "1.0"], ["step of 1", "1.1"]]
    assert seen == [cards, ["the stream ended early"]]
