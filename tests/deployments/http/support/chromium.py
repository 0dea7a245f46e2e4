"""A real browser for the web page: headless Chromium, controlled by its DevTools protocol over a pipe."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.patience import PATIENCE_S

NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
PROGRAM = next((found for name in NAMES if (found := shutil.which(name))), None)
needs_chromium = pytest.mark.skipif(PROGRAM is None, reason=f"needs a browser: one of {', '.join(NAMES)}")
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run")
PIPE = ("--remote-debugging-pipe", "about:blank")
KEYS = {"Enter": 13, "Tab": 9, "Space": 32}
TEXTS = {"Enter": "\r", "Space": " "}
NAMES_OF_KEYS = {"Space": " "}
"""Keys whose ``key`` differs from their ``code``."""
CONTROL = 2


READY = "typeof models === 'object' && models.size > 0 && fields.model.options.length > 0 && !!state.dataset.state"


class Chromium:
    """One page of ``width`` times ``height`` pixels. ``evaluate`` returns JavaScript's result and awaits promises."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._session: dict[str, str] = {}
        self._num_sent, self._rest = 0, b""
        target = self.call("Target.createTarget", url="about:blank")
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = {"sessionId": attached["sessionId"]}

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._num_sent += 1
        message = {"id": self._num_sent, "method": method, "params": params, **self._session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._num_sent:
            pass
        assert "error" not in answer, answer
        return dict(answer["result"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            read = os.read(self._from, 1 << 20)
            assert read, "the browser has ended"
            self._rest += read
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))

    def evaluate(self, expression: str) -> Any:
        told = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def wait_for(self, expression: str) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while not self.evaluate(expression):
            assert time.monotonic() < end_s, f"never so: {expression}; {self.evaluate('document.body.innerText')}"
            time.sleep(0.02)

    def resize(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def open(self, url: str) -> None:
        """Open the page, and wait until it knows its models and its server's health."""
        self._leave("Page.navigate", url=url)

    def reload(self) -> None:
        """Open the page once more, like ``open``."""
        self._leave("Page.reload")

    def _leave(self, method: str, **params: Any) -> None:
        """Wait for the new page: the browser answers before the old one, also ready, is gone."""
        self.evaluate("globalThis.isLeft = true")
        self.call(method, **params)
        self.wait_for(f"!globalThis.isLeft && document.readyState === 'complete' && {READY}")

    def choose(self, field: str, *files: Path) -> None:
        """Choose files in the file input ``field``, an expression, like a person in the browser's dialog."""
        node = self.call("Runtime.evaluate", expression=field)["result"]
        self.call("DOM.setFileInputFiles", files=[str(file) for file in files], objectId=node["objectId"])

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0) -> None:
        code = {
            "key": NAMES_OF_KEYS.get(key, key),
            "code": key,
            "windowsVirtualKeyCode": KEYS[key],
            "modifiers": modifiers,
        }
        text = {"text": TEXTS[key]} if key in TEXTS else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **code)


@contextmanager
def chromium(folder: Path) -> Iterator[Chromium]:
    """Start a browser that reads orders from its file 3 and answers into its file 4."""
    assert PROGRAM is not None
    orders, to_browser = os.pipe()
    from_browser, answers = os.pipe()
    command = [PROGRAM, *OPTIONS, f"--user-data-dir={folder}", *PIPE]
    shell = ["bash", "-c", f'exec "$@" 3<&{orders} 4>&{answers}', "browser", *command]
    process = subprocess.Popen(shell, pass_fds=(orders, answers), stderr=subprocess.DEVNULL)
    os.close(orders)
    os.close(answers)
    try:
        yield Chromium(to_browser, from_browser)
    finally:
        os.close(to_browser)
        os.close(from_browser)
        process.terminate()
        process.wait(PATIENCE_S)
