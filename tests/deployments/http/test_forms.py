"""Forms are read in clients' encodings, and values that are no text are refused."""

from __future__ import annotations

from urllib.parse import urlencode

import httpx
import pytest

from tests.deployments.http.test_errors import error_of
from tests.deployments.support.fake_service import FakeService

VIDEOS = "/v1/videos"
QUERY = "application/x-www-form-urlencoded"
MULTIPART = "multipart/form-data; boundary=b"
PROMPT = "caf\u00e9 & \u732b + 100 % = ?"


def multipart(name: bytes, value: bytes) -> bytes:
    head = b'--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\na\r\n'
    return head + b'--b\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n--b--\r\n' % (name, value)


async def post(client: httpx.AsyncClient, content: bytes, content_type: str) -> httpx.Response:
    return await client.post(VIDEOS, content=content, headers={"Content-Type": content_type})


@pytest.mark.parametrize("content_type", [QUERY, f"{QUERY}; charset=UTF-8"])
async def test_text_is_what_encoders_of_others_wrote(client: httpx.AsyncClient, content_type: str) -> None:
    """The encoders are urllib's, httpx's, and ``curl -d`` with bytes of UTF-8."""
    raw = b"prompt=" + PROMPT.encode().replace(b"%", b"%25").replace(b"&", b"%26").replace(b"+", b"%2B")
    for content in (urlencode({"prompt": PROMPT, "size": ""}).encode(), raw):
        assert (await post(client, content, content_type)).json()["prompt"] == PROMPT
    assert (await client.post(VIDEOS, data={"prompt": PROMPT})).json()["prompt"] == PROMPT
    assert (await client.post(VIDEOS, files={"prompt": (None, PROMPT)})).json()["prompt"] == PROMPT


@pytest.mark.parametrize(
    ("content", "content_type", "param"),
    [
        (b"prompt=caf\xe9", QUERY, "prompt"),
        (b"prompt=caf%E9", QUERY, "prompt"),
        (b"prompt=a&caf%E9=1", QUERY, "The name of a field"),
        (multipart(b"negative_prompt", b"caf\xe9"), MULTIPART, "negative_prompt"),
    ],
)
async def test_what_is_not_utf8_is_refused(
    client: httpx.AsyncClient, service: FakeService, content: bytes, content_type: str, param: str
) -> None:
    error = error_of(await post(client, content, content_type), 400)
    assert (error["param"], "not in UTF-8" in error["message"]) == (param, True)
    assert service.performed == []


@pytest.mark.parametrize("charset", ["undefined", "latin-1", "punycode", "nonsense", "hex"])
async def test_another_charset_is_named(client: httpx.AsyncClient, charset: str) -> None:
    for content, content_type in ((b"prompt=a", QUERY), (multipart(b"seed", b"1"), MULTIPART)):
        error = error_of(await post(client, content, f"{content_type}; charset={charset}"), 400)
        assert error["message"] == f"The form's charset is '{charset}'; send it in UTF-8"


async def test_a_form_has_an_end(client: httpx.AsyncClient) -> None:
    error = error_of(await post(client, b"&".join([b"prompt=a"] * 101), QUERY), 400)
    assert "too many fields" in error["message"]
