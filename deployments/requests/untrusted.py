"""Texts of clients, decoded in memory that their length bounds: JSON and percent-encoding."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote_to_bytes

from pydantic_core import from_json

from deployments.requests.request_errors import RequestError

MAX_VALUES = 100_000
"""Values of one JSON text. Small ones take thirty times their text, and requests have some hundreds."""
BEFORE_VALUES = ",[{"
"""Characters, one of which is before each value but the first, or before its name."""
STEP_BYTES = 1 << 16
"""Bytes that are decoded at a time, since each escape is an object meanwhile."""


def json_value(text: str | bytes) -> Any:
    """Return the value of ``text`` (RFC 8259, UTF-8; no NaN or lone surrogates). The last of equal names counts.

    RequestError if it seems to hold more than ``MAX_VALUES``. ValueError if it is no JSON, or is nested too deeply.
    """
    data = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    if sum(data.count(one.encode()) for one in BEFORE_VALUES) > MAX_VALUES:
        message = f"The JSON has too many values; the limit is {MAX_VALUES}, and commas in texts count as well"
        raise RequestError(message, code="bad_json")
    return from_json(data, allow_inf_nan=False)


def percent_decoded(data: bytes) -> bytes:
    """Return ``data`` without percent-encoding (RFC 3986, section 2.1)."""
    if b"%" not in data:
        return data
    decoded, at = bytearray(), 0
    while at < len(data):
        end = at + STEP_BYTES
        cut = data.rfind(b"%", end - 2, end)  # an escape has three bytes
        end = end if cut < 0 else cut
        decoded += unquote_to_bytes(data[at:end])
        at = end
    return bytes(decoded)
