"""A model's description for its users: text, sizes, example prompts.

It is the value of ``card`` in ``troupe.json``, with the keys of ``Description``. All are optional; an unknown key is an
error. Missing text and prompts are derived from the model's defaults.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from pipelines.defaults import Defaults
from pipelines.directory import DEFAULTS_FILE, read_own
from pipelines.own_defaults import CARD
from pipelines.size import Size
from pipelines.wording import counted

RATIOS = ((1, 1), (4, 3), (3, 4), (3, 2), (2, 3), (16, 9), (9, 16))


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """A model's description."""

    text: str = ""
    """What the model makes from which inputs, in a sentence or two."""
    sizes: tuple[str, ...] = ()
    """Sizes of the training, as WIDTHxHEIGHT."""
    prompts: tuple[str, ...] = ()
    """Example prompts."""

    def sizes_within(self, defaults: Defaults) -> tuple[str, ...]:
        """Return its sizes, or else the default size and common shapes of as many pixels. All are valid."""
        if self.sizes:
            return self.sizes
        num_pixels = defaults.width * defaults.height
        sides = [(math.sqrt(num_pixels * wide / high), math.sqrt(num_pixels * high / wide)) for wide, high in RATIOS]
        sizes = [Size(width=defaults.width, height=defaults.height), *(defaults.nearest_size(*pair) for pair in sides)]
        return tuple(dict.fromkeys(str(size) for size in sizes))


NO_DESCRIPTION = Description()
SCENES = (
    "a red fox asleep in fresh snow",
    "a sailing boat on a calm lake, watercolour",
    'a small bakery at night, a sign says "open"',
)
MOVING_SCENES = (
    "a red fox runs through fresh snow",
    "waves roll onto a beach, seen from above",
    "a paper boat drifts down a stream, close-up",
)
CHANGES = ("make it a watercolour painting", "put a snowy mountain behind it", "make it night")
MOTIONS = ("the camera moves slowly closer", "wind moves hair and leaves", "everything begins to move")
FILLINGS = ("a vase of sunflowers", "an empty wooden table", "a sleeping cat")
"""Example prompts for text, for editing a picture, for a first frame, and for a masked area."""


def usual_description(defaults: Defaults) -> Description:
    """Return a description derived from ``defaults``: what the model makes from which inputs, and example prompts."""
    fewest, most = defaults.min_pictures, defaults.max_pictures
    source = counted(most, "picture", "pictures") if fewest == most else f"up to {counted(most, 'picture', 'pictures')}"
    source = "a picture" if most == 1 else source
    if defaults.needs_mask:
        return Description(text="Paints the masked area of a picture, as the prompt says.", prompts=FILLINGS)
    if defaults.max_layers:
        return Description(text=f"Takes a picture apart into {counted(defaults.num_layers, 'layer', 'layers')}.")
    if defaults.needs_video and fewest:
        return Description(text=f"Makes clips from {source}, a clip and a prompt.", prompts=MOTIONS)
    if defaults.needs_video:
        return Description(text="Changes clips as the prompt says.", prompts=CHANGES)
    if defaults.needs_source:
        return Description(text=f"Makes clips from {source}, from a clip, or both, and a prompt.", prompts=MOTIONS)
    if defaults.kind == "video":
        if fewest:
            return Description(text=f"Makes clips from {source} and a prompt.", prompts=MOTIONS)
        pictures = f", or from {source} and a prompt" if most else ""
        return Description(text=f"Makes clips from a prompt{pictures}.", prompts=MOVING_SCENES)
    if defaults.needs_control:
        return Description(text="Makes pictures from a prompt and a control picture.", prompts=SCENES)
    what = "Changes" if defaults.edits else "Paints over"
    if fewest:
        return Description(text=f"{what} {source} as the prompt says.", prompts=CHANGES)
    pictures = f" {what} {source} as the prompt says." if most else ""
    return Description(text=f"Makes pictures from a prompt.{pictures}", prompts=SCENES)


def read_description(path: Path, defaults: Defaults) -> Description:
    """Return the description in ``path/troupe.json``, completed by the usual one.

    ValueError for unknown keys, values of other types, and invalid sizes.
    """
    file, written = path / DEFAULTS_FILE, read_own(path).get(CARD, {})
    names = [field.name for field in fields(Description)]
    if not isinstance(written, dict):
        raise ValueError(f"{file}: {CARD} is {json.dumps(written)}; it must be an object with {', '.join(names)}")
    if unknown := sorted(written.keys() - set(names)):
        raise ValueError(f"{file} has unknown keys {', '.join(unknown)} in {CARD}; known: {', '.join(names)}")
    for name, value in written.items():
        words = [value] if name == "text" else value
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise ValueError(f"{file}: {CARD}.{name} must be {'a text' if name == 'text' else 'a list of texts'}")
    values: dict[str, Any] = {name: value if name == "text" else tuple(value) for name, value in written.items()}
    try:
        for text in values.get("sizes", ()):
            check_size(text, defaults)
    except ValueError as error:
        raise ValueError(f"{file}: {CARD}.sizes: {error}") from None
    return replace(usual_description(defaults), **values)


def check_size(text: str, defaults: Defaults) -> None:
    """Raise ValueError for a size outside the limits, or one with frames."""
    size = Size.parse(text)
    if size.num_frames is not None:
        raise ValueError(f"size {text!r}: write it as WIDTHxHEIGHT in pixels, without frames")
    defaults.check_size(size.width, size.height)
