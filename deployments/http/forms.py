"""Forms (RFC 7578, and the URL Standard's), of which nothing is written to the disk."""

from __future__ import annotations

import asyncio
import codecs
import re
import sys
from contextlib import aclosing
from dataclasses import dataclass, field

from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from deployments.requests.bodies import MediaBody
from deployments.requests.request_errors import RequestError, printable, shown
from deployments.requests.untrusted import percent_decoded

MAX_FILES, MAX_FIELDS = 100, 100
MAX_TEXT_BYTES = sys.maxsize
"""Limit of a text field, which may hold a picture; the limit of the whole body holds already."""
A_FILE = "(a file)"
"""Text in place of a file's content, where no field takes one."""
BRACKETS = re.compile(r"\[(\d*|image_url|video_url|file_id|id)\]$")
"""Clients' suffixes of fields with several values, or with those of an object: ``image[]``, ``video[id]``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """Fields of a multipart form."""

    fields: dict[str, str] = field(default_factory=dict)
    """Texts by name."""
    pictures: dict[str, list[bytes | str]] = field(default_factory=dict)
    """Files, or URLs that hold them, by field and in their order."""


class _MemoryParser(MultiPartParser):
    spool_max_size = 0  # none goes to the disk

    def on_part_end(self) -> None:
        """Refuse text that is not UTF-8, which Starlette would read as Latin-1."""
        part = self._current_part
        if part.file is None:
            _check_utf8(part.data, part.field_name)
        super().on_part_end()


async def read_form(request: Request, body_type: type[MediaBody]) -> Form:
    """Return the fields of a form. RequestError if it is no form, or has a file in the place of text."""
    form = Form()
    for name, value in (await parse_form(request)).multi_items():
        known = BRACKETS.sub("", name)
        if known in body_type.picture_fields:
            if (picture := await _picture(value)) is not None:
                form.pictures.setdefault(known, []).append(picture)
        elif isinstance(value, UploadFile):
            if name in body_type.model_fields:
                raise RequestError(f"{name} is a file; it must be a plain form field", name)
            form.fields[name] = A_FILE
        else:
            form.fields[name] = value
    return form


async def _picture(value: UploadFile | str) -> bytes | str | None:
    """Return the picture; None for an empty text or an empty file input of a browser."""
    if isinstance(value, str):
        return value or None
    data = await value.read()
    return data if data or value.filename else None


async def parse_form(request: Request) -> FormData:
    """Return the fields of a form, with files in memory. RequestError if it cannot be read."""
    content_type = request.headers["content-type"]
    _check_charset(content_type)
    if not content_type.lower().startswith("multipart/"):
        return await asyncio.to_thread(_parse_query, await request.body())
    limits = {"max_files": MAX_FILES, "max_fields": MAX_FIELDS, "max_part_size": MAX_TEXT_BYTES}
    async with aclosing(request.stream()) as stream:
        try:
            return await _MemoryParser(request.headers, stream, **limits).parse()
        except MultiPartException as error:
            raise RequestError(f"The body is no form that can be read: {error.message}") from None


def _check_charset(content_type: str) -> None:
    """Raise RequestError unless a form is in UTF-8, the default of both kinds (RFC 7578, section 5.1.2)."""
    charset = parse_options_header(content_type)[1].get(b"charset", b"utf-8").decode("latin-1")
    try:
        is_utf8 = codecs.lookup(charset).name in ("utf-8", "ascii")
    except (LookupError, ValueError):
        is_utf8 = False
    if not is_utf8:
        raise RequestError(f"The form's charset is {shown(charset)}; send it in UTF-8")


def _check_utf8(text: bytes | bytearray, name: str) -> None:
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"{printable(name)} is not in UTF-8: {error.reason}", printable(name)) from None


def _parse_query(raw: bytes) -> FormData:
    """Return the fields of a URL-encoded form (URL Standard, section 5.1)."""
    fields: list[tuple[str, UploadFile | str]] = []
    for pair in filter(None, raw.split(b"&", MAX_FIELDS)):
        name, _, text = (percent_decoded(part.replace(b"+", b" ")) for part in pair.partition(b"="))
        _check_utf8(name, "The name of a field")
        _check_utf8(text, name.decode())
        fields.append((name.decode(), text.decode()))
    if len(fields) > MAX_FIELDS:
        raise RequestError(f"The form has too many fields; the limit is {MAX_FIELDS}")
    return FormData(fields)
