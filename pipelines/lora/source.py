"""The adapters that a configuration names for a model. Needs no torch."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from engines.core.field_error import FieldError
from pipelines.request import Lora

ADAPTER_FILES = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors")
"""File names of diffusers and PEFT."""
LORA_FILE, PEFT_CONFIG = "adapter.safetensors", "adapter_config.json"
"""The files of an adapter that came at run time, in its folder; the second as PEFT writes it beside an adapter."""
MAX_SCALE = 10.0
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"


class AdapterError(FieldError):
    """A fault of an adapter; ``field`` is where: its ``file``, its ``config``, or the ``part`` that it is named for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSource:
    """An adapter, by its place and use. Adapters for several parts may share a name."""

    path: str
    """A file, a folder, the name of a shipped checkpoint or a hub id."""
    file: str = ""
    """The file in that folder or repository."""
    name: str = ""
    """Added for requests with this name; without a name, added to the weights when they are loaded."""
    scale: float = 1.0
    """Factor of the addition, unless a request has its own."""
    part: str = ""
    """The transformer that it is for. Keys of other parts are then dropped; without ``part`` they are an error."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("an adapter needs a path: a file, a folder or a hub id")
        if self.name and not re.fullmatch(NAME, self.name):
            raise ValueError(f"{self.name!r} is no name for an adapter: letters, digits, points, dashes, underscores")
        check_scale(self.scale)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraLimits:
    """Limits of a model's adapters that come at run time."""

    max_loras: int = 64
    """Adapters of the model, over all API keys."""
    max_loaded: int = 8
    """Adapters in the memory of each rank and of its device. The least recently used ones leave it first."""
    memory_gib: float = 2.0
    """Memory of the loaded adapters, which limits each of them as well."""

    def __post_init__(self) -> None:
        for name in ("max_loras", "max_loaded", "memory_gib"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * 2**30)


def check_scale(scale: float) -> None:
    """Raise ValueError outside the limits: beyond them the picture is noise."""
    if not (math.isfinite(scale) and abs(scale) <= MAX_SCALE):
        raise ValueError(f"scale is {scale:g}; it must be from {-MAX_SCALE:g} to {MAX_SCALE:g}")


def named(sources: tuple[LoraSource, ...]) -> tuple[Lora, ...]:
    """Return the adapters that requests may name, with their default scales."""
    loras: dict[str, Lora] = {}
    for one in sources:
        if one.name:
            loras.setdefault(one.name, Lora(name=one.name, scale=one.scale))
    return tuple(loras.values())


def check_sources(sources: tuple[LoraSource, ...]) -> None:
    """Raise ValueError if a name is given twice for one part, or has different scales."""
    places = [(one.name, one.part) for one in sources if one.name]
    for name, part in places:
        if places.count((name, part)) > 1:
            raise ValueError(f"two adapters are named {name!r}: give each its own name, or its own part")
    for one in named(sources):
        if len({source.scale for source in sources if source.name == one.name}) > 1:
            raise ValueError(f"the adapters named {one.name!r} have different scales: give them one")
