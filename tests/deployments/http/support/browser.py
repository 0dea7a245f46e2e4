"""A minimal browser for the web page, in node: elements without looks, six connections, no server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import asdict
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from pipelines.defaults import Defaults

WEB = files("deployments") / "web"
PAGE = (WEB / "index.html").read_text(encoding="utf-8")
ASSETS: list[str] = re.findall(r'(?:src|href)="([^"]+)"', PAGE)
SCRIPT = "\n".join((WEB / name).read_text(encoding="utf-8") for name in ASSETS if name.endswith(".js"))
IDS = [name for name in re.findall(r'id="(\w+)"', PAGE) if name != "form"]
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run the script")

BROWSER = """
class Element {
  children = [];
  append(...added) { this.children.push(...added); for (const one of added) one.parent = this; }
  prepend(...added) { this.append(...added); this.children.unshift(...this.children.splice(-added.length)); }
  remove() { this.parent?.children.splice(this.parent.children.indexOf(this), 1); this.parent = null; }
  replaceChildren(...added) { for (const one of [...this.children]) one.remove(); this.append(...added); }
  get all() { return this.children.flatMap((one) => [one, ...one.all]); }
  get isConnected() { return Object.values(byId).includes(this) || (this.parent?.isConnected ?? false); }
  querySelector(name) { return this.all.find((one) => name === one.tag || name === `.${one.className}`) ?? null; }
}
const { fields, parts } = PAGE;
for (const [name, field] of Object.entries(fields)) {
  Object.assign(field, { name, setCustomValidity: (said) => { field.problem = said; }, replaceChildren: () => {} });
}
const inside = (kind) => Object.values(fields).filter((field) => field.kind === kind);
const byId = Object.fromEntries(IDS.map((id) => [id, new Element()]));
byId.form = {
  elements: fields,
  querySelectorAll: () => parts.map((kind) => ({ dataset: { kind }, querySelectorAll: () => inside(kind) })),
};
let numFree = 6;
const waiting = [];
async function connected(url, options = {}) {
  if (!numFree) await new Promise((resolve) => waiting.push(resolve));
  numFree--;
  try {
    return await serve(`${options.method ?? "GET"} ${url.pathname}${url.search}`, options);
  } finally {
    numFree++;
    waiting.shift()?.();
  }
}
const globals = {
  document: {
    getElementById: (id) => byId[id],
    createElement: (tag) => Object.assign(new Element(), { tag }),
  },
  addEventListener: () => {},  // what a page begins with when it is loaded, a test begins itself
  location: { pathname: "/", origin: "http://localhost" },
  sessionStorage: { getItem: () => null, setItem: () => {} },
  fetch: connected,
  serve: async () => { throw new Error("no server"); },
};
for (const [name, value] of Object.entries(globals)) Object.defineProperty(globalThis, name, { value, writable: true });
"""
"""``PAGE``: fields of the form by name, and the kinds that its parts are for. A test's ``serve`` answers requests."""


class Form(HTMLParser):
    """Fields by name, with their attributes and the ``kind`` of their part; and all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.fields: dict[str, dict[str, Any]] = {}
        self.parts: list[str] = []
        self._inside: list[str | None] = []
        self.feed(PAGE)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes: dict[str, Any] = dict(attrs)
        if "data-kind" in attributes:
            self.parts.append(attributes["data-kind"])
        kind = attributes.get("data-kind") or (self._inside[-1] if self._inside else None)
        if tag not in ("meta", "input"):
            self._inside.append(kind)
        if tag in ("input", "select", "textarea") and "name" in attributes:
            self.fields[attributes["name"]] = {"value": "", **attributes, "kind": kind}

    def handle_endtag(self, tag: str) -> None:
        self._inside.pop()


def run_page(folder: Path, then: str, defaults: Defaults | None = None) -> Any:
    """Return the JSON that ``then`` prints once the page is loaded. With ``defaults`` it shows a model ``m``."""
    form = Form()
    browser = BROWSER.replace("PAGE", json.dumps({"fields": form.fields, "parts": form.parts}))
    browser = browser.replace("IDS", json.dumps(IDS))
    shown = ""
    if defaults is not None:
        pictures = asdict(defaults.of("image")) if "image" in defaults.kinds[1:] else None
        model: dict[str, Any] = {
            "id": "m",
            "kind": defaults.kind,
            "defaults": asdict(defaults),
            "picture_defaults": pictures,
        }
        model |= {"recipes": {}, "loras": [], "takes_loras": False}
        shown = f'models.set("m", {json.dumps(model)}); fields.model.value = "m"; showModel();'
    script = folder / "page.js"
    script.write_text(f"(() => {{{browser}}})();\n{SCRIPT}\n{shown}\n{then}\n")
    done = subprocess.run(["node", script], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)
