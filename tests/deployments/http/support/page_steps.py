"""Steps of a person on the web page, in a real browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.deployments.http.support.chromium import CONTROL, Chromium


def written(file: Path, data: bytes) -> Path:
    file.write_bytes(data)
    return file


def take(page: Chromium, model: str) -> None:
    page.evaluate(f"fields.model.value = '{model}'; fields.model.onchange()")


def fill(page: Chromium, **values: object) -> None:
    for name, value in values.items():
        page.evaluate(f"fields.{name}.value = '{value}'; fields.{name}.dispatchEvent(new Event('input'))")


def press(page: Chromium, name: str, number: int = 0) -> None:
    """Press a button by its name, with the keyboard."""
    found = f"[...document.querySelectorAll('button')].filter((one) => (one.ariaLabel ?? one.textContent) === '{name}')"
    page.wait_for(f"{found}[{number}]?.checkVisibility() ?? false")
    page.evaluate(f"{found}[{number}].focus()")
    page.press("Enter")


def send(page: Chromium) -> None:
    """Generate, and wait until the picture or clip is on its card; fail on an error or a refused field."""
    page.evaluate("fields.prompt.focus()")
    page.press("Enter", CONTROL)
    page.wait_for("!!gallery.querySelector('.failure') || !!gallery.firstChild.querySelector('a[download]')")
    assert not page.evaluate("gallery.querySelector('.failure')?.innerText ?? form.querySelector(':invalid')?.name")


def shown_error(page: Chromium) -> Any:
    page.wait_for("!!gallery.querySelector('.failure')")
    return page.evaluate("gallery.querySelector('.failure p').textContent")
