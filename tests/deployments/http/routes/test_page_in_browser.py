"""A real browser shows the web page: visible, readable, and usable with keys alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from deployments.http.drain import Drain
from pipelines.request import MediaRequest
from tests.deployments.http.conftest import build, serving
from tests.deployments.http.support.chromium import CONTROL, Chromium, needs_chromium
from tests.deployments.support.fake_service import FakeService

pytestmark = needs_chromium

AA = 4.5
"""The contrast of WCAG 2.2 at level AA (success criterion 1.4.3)."""
IN_SIGHT = """
[document.querySelector("button.go"), fields.prompt].map((one) => {
  const { left, top, right, bottom } = one.getBoundingClientRect();
  const isInside = left >= 0 && top >= 0 && right <= innerWidth && bottom <= innerHeight;
  const onTop = document.elementFromPoint((left + right) / 2, (top + bottom) / 2);
  return isInside && onTop === one;
})
"""
COLOURS = """
["", "::placeholder"].map((part) => getComputedStyle(fields.prompt, part || null).color)
  .concat(getComputedStyle(fields.prompt).backgroundColor)
"""


@pytest.fixture
def service() -> FakeService:
    return FakeService(only_inpaints=True)


@pytest.fixture
def page(browser: Chromium, url: str) -> Chromium:
    browser.resize(1366, 625)
    browser.open(url)
    return browser


def luminance(colour: str) -> float:
    """Return the relative luminance of ``rgb(r, g, b)``, as WCAG 2.2 defines it."""
    values = [int(value) / 255 for value in re.findall(r"\d+", colour)[:3]]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values]
    return sum(share * value for share, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize(("width", "height"), [(1366, 625), (390, 844)])
@pytest.mark.parametrize("model", ["fake-pictures", "fake-clips", "fake-inpaints"])
def test_the_form_and_its_button_are_in_sight(page: Chromium, width: int, height: int, model: str) -> None:
    """This holds at any scroll position, with any number of results."""
    page.resize(width, height)
    page.reload()
    page.evaluate(f"fields.model.value = '{model}'; fields.model.onchange()")
    page.evaluate("for (let i = 0; i < 30; i++) gallery.append(makeCard('a').node)")
    for scroll in ("scrollTo(0, 1e6)", "gallery.scrollTop = 1e6", "form.scrollTop = 0"):
        page.evaluate(scroll)
        assert page.evaluate(IN_SIGHT) == [True, True], scroll
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_is_typed_is_darker_than_what_stands_there_before(page: Chromium, scheme: str) -> None:
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    typed, placeholder, ground = page.evaluate(COLOURS)
    assert contrast(typed, ground) > contrast(placeholder, ground) >= AA
    page.call("Emulation.setEmulatedMedia", features=[])


def test_control_and_enter_draw_an_example(page: Chromium, service: FakeService) -> None:
    prompts = page.evaluate("models.get('fake-pictures').prompts")
    assert page.evaluate("about.textContent") == page.evaluate("models.get('fake-pictures').description") != ""
    assert page.evaluate("[...examples.children].map((one) => one.textContent)") == prompts
    page.evaluate("examples.children[1].click()")
    page.type(", at night")
    page.evaluate(
        "const heard = []; new MutationObserver(() => heard.push(news.textContent)).observe(news, {childList: true})"
    )
    page.press("Enter", CONTROL)
    page.wait_for("!!gallery.querySelector('a[download]')")
    assert [request.prompt for request in service.performed] == [f"{prompts[1]}, at night"]
    heard = page.evaluate("heard")
    assert re.fullmatch(r"queued, about \d+ s", heard[1])
    assert heard[-1].startswith("seed ")
    assert len(heard) <= 4, "steps are not read aloud"


def test_cards_that_wait_tell_their_place_and_time(page: Chromium, service: FakeService) -> None:
    service.step_s = 1000
    page.evaluate("fields.n.value = 2; fields.prompt.focus()")
    page.type("a")
    page.press("Enter", CONTROL)
    page.wait_for("gallery.innerText.includes('behind')")
    told = re.findall(r"queued.*, about \d+ s", page.evaluate("gallery.innerText"))
    assert sorted(text.partition(",")[0] for text in told) == ["queued", "queued behind 1"]
    page.evaluate("for (const one of gallery.querySelectorAll('button')) one.click()")
    page.wait_for("!gallery.innerText.includes('queued')")


def test_an_error_is_one_card_that_can_be_dismissed(page: Chromium, service: FakeService) -> None:
    def fail(request: MediaRequest) -> None:
        raise RuntimeError("secret detail")

    service.before = fail
    page.evaluate("fields.n.value = 3; fields.prompt.focus()")
    page.type("a")
    for text in ("file one", "file two"):
        page.evaluate(f"showError('{text}')")
    page.press("Enter", CONTROL)
    page.wait_for("gallery.children.length === 1 && !gallery.innerText.includes('file')")
    assert page.evaluate("gallery.firstChild.role") == "alert"
    assert "Internal error" in page.evaluate("gallery.querySelector('[role=alert] p').textContent")
    page.evaluate("gallery.querySelector('button').focus()")
    page.press("Enter")
    assert page.evaluate("[gallery.children.length, document.activeElement.name]") == [0, "prompt"]


def test_the_next_order_clears_an_error_and_a_stopped_picture_goes(page: Chromium, service: FakeService) -> None:
    service.step_s = 0.1
    page.evaluate("showError('too large'); fields.num_inference_steps.value = 100; fields.prompt.focus()")
    page.type("a")
    page.press("Enter", CONTROL)
    page.wait_for("gallery.querySelectorAll('.failure').length === 0 && gallery.innerText.includes('step ')")
    page.evaluate("gallery.querySelector('button').click()")
    page.wait_for("gallery.innerText.includes('stopped')")
    page.evaluate("gallery.querySelector('button').focus()")
    page.press("Enter")
    assert page.evaluate("[gallery.children.length, document.activeElement.name]") == [0, "prompt"]


def test_a_page_below_a_path_finds_its_files(browser: Chromium, tmp_path: Path, service: FakeService) -> None:
    """A proxy removes the path, and nothing adds the slash at its end."""
    app = build(service, tmp_path)

    async def proxied(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            is_ours = scope["path"].startswith("/pictures")
            path = scope["path"].removeprefix("/pictures") or "/" if is_ours else "/of-others"
            scope = {**scope, "path": path, "raw_path": path.encode()}
        await app(scope, receive, send)

    with serving(proxied) as url:
        browser.open(f"{url}/pictures?a=b#c")
        assert browser.evaluate("location.href") == f"{url}/pictures/?a=b#c"
        assert browser.evaluate("getComputedStyle(form).display") == "grid"


def test_a_mask_that_is_needed_is_asked_for_before_anything_is_sent(page: Chromium, service: FakeService) -> None:
    page.evaluate("fields.model.value = 'fake-inpaints'; fields.model.onchange(); fields.prompt.focus()")
    page.type("a")
    page.press("Enter", CONTROL)
    needed = "This model needs 1 picture: choose a file, or drop it here"
    assert page.evaluate("fields.image.validationMessage") == needed
    file = "kept.items.add(new File(['a'], 'a.png', { type: 'image/png' }))"
    page.evaluate(f"const kept = new DataTransfer(); {file}; fields.image.files = kept.files; checkFiles()")
    page.press("Enter", CONTROL)
    assert "This model paints what a mask marks" in page.evaluate("fields.mask.validationMessage")
    assert service.performed == []
    page.evaluate("fields.mask.files = kept.files; checkFiles()")
    assert page.evaluate("form.checkValidity()")


def test_the_header_follows_the_health(
    browser: Chromium, tmp_path: Path, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(build(service, tmp_path)) as url:
        browser.open(url)
        assert browser.evaluate("[state.dataset.state, state.textContent]") == ["ready", "ready"]
        service.reasons = {"fake-clips": "Denoiser has no running replica"}
        browser.evaluate("showHealth()")
        told = browser.evaluate("[state.dataset.state, state.textContent]")
        assert told == ["rebuilding", "rebuilding: fake-clips: Denoiser has no running replica"]
        monkeypatch.setattr(Drain, "has_begun", True)
        browser.evaluate("showHealth()")
        assert browser.evaluate("state.dataset.state") == "draining"
    browser.evaluate("showHealth()")
    assert browser.evaluate("state.dataset.state") == "away"


def test_every_control_has_a_name(page: Chromium) -> None:
    """The browser gives these names to screen readers."""
    page.evaluate(
        "gallery.append(makeCard('a').node); document.querySelectorAll('details').forEach((one) => one.open = true)"
    )
    nodes: list[dict[str, Any]] = page.call("Accessibility.getFullAXTree")["nodes"]
    roles = {"textbox", "combobox", "button", "spinbutton", "progressbar", "region", "DisclosureTriangle"}
    found = [node for node in nodes if node.get("role", {}).get("value") in roles and not node["ignored"]]
    assert {"textbox", "combobox", "button", "spinbutton", "progressbar"} <= {node["role"]["value"] for node in found}
    assert [node for node in found if not node.get("name", {}).get("value")] == []
