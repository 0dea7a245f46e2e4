"""Mixes of requests: classes, and how often each comes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator

Kind = Literal["picture", "clip"]
MIXES = Path(__file__).parent / "mixes"


class RequestClass(BaseModel):
    """Requests with the same ``body`` beside their seeds. ``share`` is relative to those of other classes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    kind: Kind = "picture"
    share: Annotated[float, Field(gt=0)] = 1.0
    body: Mapping[str, Any]

    @property
    def path(self) -> str:
        return "/v1/images/generations" if self.kind == "picture" else "/v1/videos/sync"

    @property
    def num_media(self) -> int:
        """Number of pictures or clips of a request."""
        return int(self.body.get("n", 1))


class Mix(BaseModel):
    """Classes and their shares."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    classes: tuple[RequestClass, ...]

    @field_validator("classes")
    @classmethod
    def _have_names_of_their_own(cls, classes: tuple[RequestClass, ...]) -> tuple[RequestClass, ...]:
        names = [one.name for one in classes]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"classes are {names}; there must be some, each with a name of its own")
        return classes

    def drawn(self, random: Random) -> RequestClass:
        (one,) = random.choices(self.classes, [one.share for one in self.classes])
        return one

    def mean(self, values: Mapping[str, float]) -> float:
        """Return the mean of a class's value over requests."""
        return sum(one.share * values[one.name] for one in self.classes) / sum(one.share for one in self.classes)

    def named(self, name: str) -> RequestClass:
        for one in self.classes:
            if one.name == name:
                return one
        raise ValueError(f"there is no class {name!r}; known: {', '.join(one.name for one in self.classes)}")


def load_mix(name: str) -> Mix:
    """Read a file, or a known mix by its name. ValueError says what is wrong with it."""
    return Mix.model_validate(yaml.safe_load(known_file(name, MIXES, ".yaml").read_text()))


def known_file(name: str, folder: Path, suffix: str, *others: str) -> Path:
    """Return a file, or one of ``folder`` by its name without suffix. ValueError lists known names and ``others``."""
    path = Path(name) if Path(name).is_file() else folder / f"{name}{suffix}"
    if not path.is_file():
        known = ", ".join([*others, *sorted(file.stem for file in folder.glob(f"*{suffix}"))])
        raise ValueError(f"{name} is neither a file nor a name in {folder.name}; known: {known}")
    return path
