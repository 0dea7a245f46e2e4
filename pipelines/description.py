"""What a model draws, for whoever chooses among models: words, good sizes, prompts to begin with.

A directory says it in its ``troupe.json`` under the key ``card``, with the keys of ``Description``. All are optional;
an unknown key is an error.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path

from pipelines.defaults import Defaults
from pipelines.own_defaults import CARD, FILE_NAME, read_own
from pipelines.size import Size

RATIOS = ((1, 1), (4, 3), (3, 4), (3, 2), (2, 3), (16, 9), (9, 16))


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """``text`` says what it draws, ``sizes`` for which WIDTHxHEIGHT it was made; ``prompts`` are examples."""

    text: str = ""
    sizes: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()

    def sizes_within(self, defaults: Defaults) -> tuple[str, ...]:
        """Returns its sizes, or without any the default one and common shapes of as many pixels. All can be made."""
        if self.sizes:
            return self.sizes
        num_pixels = defaults.width * defaults.height
        sides = [(math.sqrt(num_pixels * wide / high), math.sqrt(num_pixels * high / wide)) for wide, high in RATIOS]
        sizes = [Size(width=defaults.width, height=defaults.height), *(defaults.nearest_size(*pair) for pair in sides)]
        return tuple(dict.fromkeys(str(size) for size in sizes))


NO_DESCRIPTION = Description()


def read_description(path: Path, defaults: Defaults) -> Description:
    """Returns what ``path/troupe.json`` says of the model. ValueError for unknown keys, values that are not of these
    kinds, and sizes that no request may have."""
    file, written = path / FILE_NAME, read_own(path).get(CARD, {})
    known = [field.name for field in fields(Description)]
    if not isinstance(written, dict):
        raise ValueError(f"{file}: {CARD} is {json.dumps(written)}; it must be an object with {', '.join(known)}")
    if unknown := sorted(written.keys() - set(known)):
        raise ValueError(f"{file} has unknown keys {', '.join(unknown)} in {CARD}; known: {', '.join(known)}")
    for name, value in written.items():
        words = [value] if name == "text" else value
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise ValueError(f"{file}: {CARD}.{name} must be {'a text' if name == 'text' else 'a list of texts'}")
    lists = {name: tuple(value) for name, value in written.items() if name != "text"}
    try:
        for text in lists.get("sizes", ()):
            check_size(text, defaults)
    except ValueError as error:
        raise ValueError(f"{file}: {CARD}.sizes: {error}") from None
    return Description(text=written.get("text", ""), **lists)


def check_size(text: str, defaults: Defaults) -> None:
    """ValueError for what is no size that a request for a picture or a clip may have: frames are said apart."""
    size = Size.parse(text)
    if size.num_frames is not None:
        raise ValueError(f"size {text!r}: write it as WIDTHxHEIGHT in pixels, without frames")
    defaults.check_size(size.width, size.height)
