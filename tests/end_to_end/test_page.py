"""The running application's web page, in a real browser, draws with a recipe, a new adapter, and an edit."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.deployments.http.support.chromium import Chromium, chromium, needs_chromium
from tests.deployments.http.support.page_steps import fill, press, send, take
from tests.deployments.support.bare import assert_same_picture, bare_frames
from tests.deployments.support.live import PROMPT, SMALL, TIMEOUT_S, picture, pixels_of
from tests.end_to_end.conftest import EDITS, PICTURES

pytestmark = needs_chromium

STEPS = 4
OWN = "own"


@pytest.fixture
def page(url: str, tmp_path: Path) -> Iterator[Chromium]:
    with chromium(tmp_path) as browser:
        browser.resize(1366, 625)
        browser.open(url)
        browser.evaluate("fields.prompt.focus()")
        browser.type(PROMPT)
        take(browser, PICTURES)
        fill(browser, width=64, height=64, seed=5)
        yield browser


def newest(page: Chromium) -> bytes:
    """Return the picture on the first card."""
    url: str = page.evaluate("gallery.querySelector('.frame img').src")
    return base64.b64decode(url.partition(",")[2])


def test_a_recipe_and_its_adapter_as_one_of_ones_own(page: Chromium, url: str, models: dict[str, Path]) -> None:
    asked = SMALL | {"seed": 5, "num_inference_steps": None}
    page.evaluate("fields.recipe.value = 'four-steps'; fields.recipe.onchange()")
    send(page)
    by_recipe = newest(page)
    assert by_recipe == picture(url, recipe="four-steps", **asked)
    page.evaluate("fields.recipe.value = ''; fields.recipe.onchange(); adapters.open = true")
    page.choose("loraFiles", models[PICTURES] / "recipes" / "four-steps.safetensors")
    page.evaluate(f"loraName.value = '{OWN}'")
    press(page, "Add")
    page.wait_for("rows.length === 1")
    fill(page, num_inference_steps=STEPS)
    send(page)
    plain = newest(page)
    page.evaluate("rows[0].use.click()")
    send(page)
    assert newest(page) == picture(url, lora=[{"name": OWN}], **asked | {"num_inference_steps": STEPS})
    assert_same_picture(pixels_of(newest(page)), pixels_of(by_recipe))
    assert newest(page) != plain
    press(page, f"Delete the adapter {OWN}")
    page.wait_for("rows.length === 0")
    assert httpx.get(f"{url}/v1/loras", timeout=TIMEOUT_S).json()["data"] == []


def test_a_picture_that_was_drawn_is_changed(page: Chromium, models: dict[str, Path]) -> None:
    """The pixels are those of the bare pipeline."""
    fill(page, num_inference_steps=STEPS)
    send(page)
    drawn = newest(page)
    press(page, "Use as input")
    take(page, EDITS)
    fill(page, prompt="make the circle blue", num_inference_steps=STEPS)
    page.wait_for("fields.width.value === '64'")
    send(page)
    fields = {"size": "64x64", "num_inference_steps": STEPS, "seed": 5}
    words = {"model": EDITS, "prompt": "make the circle blue"}
    assert_same_picture(pixels_of(newest(page)), bare_frames(models, **words, image=drawn, **fields)[0])
