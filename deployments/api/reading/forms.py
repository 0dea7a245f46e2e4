"""Forms (RFC 7578, and the URL Standard's), of which nothing is written to the disk."""

from __future__ import annotations

import re
import sys
from contextlib import aclosing
from dataclasses import dataclass, field

from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import FormParser, MultiPartException, MultiPartParser
from starlette.requests import Request

from deployments.requests.bodies import MediaBody
from deployments.requests.errors import RequestError

MAX_FILES, MAX_FIELDS = 100, 100
MAX_TEXT_BYTES = sys.maxsize
"""Of a field: a text may hold a picture, and the body as a whole is bounded already."""
A_FILE = "(a file)"
"""In place of a file's content, where no field takes one."""
BRACKETS = re.compile(r"\[(\d*|image_url)\]$")
"""How clients write that a field has several values, or those of an object: ``image[]``, ``mask[image_url]``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """``fields`` are text; ``pictures`` are files, or URLs that hold them, by their field in their order."""

    fields: dict[str, str] = field(default_factory=dict)
    pictures: dict[str, list[bytes | str]] = field(default_factory=dict)


class _MemoryParser(MultiPartParser):
    spool_max_size = 0  # none goes to the disk


async def read_form(request: Request, body_type: type[MediaBody]) -> Form:
    """Returns what a form says. RequestError for what is none, and for a file in the place of text."""
    form = Form()
    for name, value in (await _parse(request)).multi_items():
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
    """Returns the picture; None for an empty text, and for a file that a browser says was not chosen."""
    if isinstance(value, str):
        return value or None
    data = await value.read()
    return data if data or value.filename else None


async def _parse(request: Request) -> FormData:
    parser: FormParser | MultiPartParser
    is_multipart = request.headers["content-type"].lower().startswith("multipart/")
    async with aclosing(request.stream()) as stream:
        if is_multipart:
            parser = _MemoryParser(
                request.headers,
                stream,
                max_files=MAX_FILES,
                max_fields=MAX_FIELDS,
                max_part_size=MAX_TEXT_BYTES,
            )
        else:
            parser = FormParser(request.headers, stream, max_fields=MAX_FIELDS, max_part_size=MAX_TEXT_BYTES)
        try:
            return await parser.parse()
        except MultiPartException as error:
            raise RequestError(f"The body is no form that can be read: {error.message}") from None
