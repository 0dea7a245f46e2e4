"""The pages about the API work offline: all their files come from the server, and the policy enforces it."""

from __future__ import annotations

import base64
import hashlib
import re
from urllib.parse import urljoin

import httpx
import pytest

TYPES = {".js": "text/javascript", ".css": "text/css", ".png": "image/png"}


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
async def test_all_that_a_page_names_is_there(client: httpx.AsyncClient, path: str) -> None:
    page = await client.get(path)
    names = re.findall(r'(?:src|href|spec-url)="([^"]+)"', page.text)
    assert len(names) >= 3
    for name in names:
        answer = await client.get(urljoin(str(client.base_url.join(path)), name))
        assert answer.status_code == 200, name
        expected = next((type_ for end, type_ in TYPES.items() if name.endswith(end)), "application/json")
        assert answer.headers["content-type"].split(";")[0] == expected
        assert len(answer.content) > 50
    assert "openapi.json" in page.text or 'url: "openapi.json"' in (await client.get("/docs/docs.js")).text


@pytest.mark.parametrize("path", ["/", "/docs", "/redoc"])
async def test_the_policy_lets_nothing_in_from_elsewhere(client: httpx.AsyncClient, path: str) -> None:
    page = await client.get(path)
    policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    allowed = {source for sources in policy.values() for source in sources.split()}
    scripts = re.findall(r"<script(?![^>]*src)[^>]*>(.*?)</script>", page.text, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    hashes = {f"'sha256-{digest}'" for digest in digests}
    assert allowed <= {"'none'", "'self'", "'unsafe-inline'", "data:", "blob:"} | hashes
    assert set(policy["script-src"].split()) == {"'self'"} | hashes, "no other script that stands in a page"
    assert not re.search(r'(?:src|href)="(?:https?:)?//', page.text)


async def test_bundled_files_are_sent_once(client: httpx.AsyncClient) -> None:
    script = await client.get("/docs/swagger-ui-bundle.js")
    again = await client.get("/docs/swagger-ui-bundle.js", headers={"If-None-Match": script.headers["etag"]})
    assert again.status_code == 304
    for name in ("index.html", "..%2Fpyproject.toml", "nothing.js"):
        assert (await client.get(f"/docs/{name}")).status_code == 404
