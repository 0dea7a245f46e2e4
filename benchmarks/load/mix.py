"""Mixes of requests, owners of keys, and arrivals: at random, in bursts, or from a file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator

from deployments.cli.serving import parse_config
from deployments.config import ServeConfig
from deployments.usage.api_keys import hash_of

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


OWNERS = Path(__file__).parent / "owners"
NOBODY = "none"
"""Name for no keys."""
NUM_DIGITS = 16
"""Digits of a key's hash in a configuration."""


class Owner(BaseModel):
    """A key. ``share`` of the requests and ``weight`` at the server are relative to those of the others."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(pattern="^[a-z0-9_]+$")]
    share: Annotated[float, Field(gt=0)] = 1.0
    weight: Annotated[float, Field(gt=0)] = 1.0

    @property
    def key(self) -> str:
        """API key at a server that a benchmark starts on this machine."""
        return f"benchmark-{self.name}"

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}


class Owners(BaseModel):
    """Owners that send a load; none if the server asks for no keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    owners: tuple[Owner, ...] = ()

    @field_validator("owners")
    @classmethod
    def _have_names_of_their_own(cls, owners: tuple[Owner, ...]) -> tuple[Owner, ...]:
        names = [one.name for one in owners]
        if len(set(names)) < len(names):
            raise ValueError(f"owners are {names}; each must have a name of its own")
        return owners

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(one.key for one in self.owners)

    @property
    def headers(self) -> dict[str, str]:
        """Headers of a request without an owner."""
        return self.owners[0].headers if self.owners else {}

    def drawn(self, num: int, seed: int) -> Sequence[Owner | None]:
        """Return the owners of ``num`` requests, by their shares. They do not change the arrivals of a seed."""
        if not self.owners:
            return [None] * num
        return Random(f"owners {seed}").choices(self.owners, [one.share for one in self.owners], k=num)

    def with_weights(self, config: ServeConfig) -> ServeConfig:
        """Return ``config`` with the weights of all keys."""
        document = config.model_dump(mode="json")
        limits = [{"key": hash_of(one.key)[:NUM_DIGITS], "weight": one.weight} for one in self.owners]
        document["applications"][0]["args"]["api"]["key_limits"] = limits
        return parse_config(document)


def load_owners(name: str) -> Owners:
    """Read a file, or known owners by their name; ``NOBODY`` gives none. ValueError says what is wrong with it."""
    if name == NOBODY:
        return Owners()
    return Owners.model_validate(yaml.safe_load(known_file(name, OWNERS, ".yaml", NOBODY).read_text()))


TRACES = Path(__file__).parent / "traces"


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """A request of ``kind``, ``at_s`` after the start; ``owner`` is None where the server asks for no keys."""

    at_s: float
    kind: RequestClass
    seed: int
    owner: Owner | None = None


def poisson(mix: Mix, rate_per_s: float, duration_s: float, seed: int) -> tuple[Arrival, ...]:
    """Return independent arrivals, ``rate_per_s`` on average."""
    random = Random(seed)

    def times() -> Iterator[float]:
        at_s = random.expovariate(rate_per_s)
        while at_s < duration_s:
            yield at_s
            at_s += random.expovariate(rate_per_s)

    return _drawn(mix, tuple(times()), random)


def bursts(mix: Mix, size: int, every_s: float, duration_s: float, seed: int) -> tuple[Arrival, ...]:
    """Return ``size`` arrivals at once, every ``every_s`` from the start on."""
    num_bursts = max(1, round(duration_s / every_s))
    return _drawn(mix, tuple(number * every_s for number in range(num_bursts) for _ in range(size)), Random(seed))


def trace_file(name: str) -> Path:
    """Return a file, or that of a known trace by its name. ValueError lists the known ones."""
    return known_file(name, TRACES, ".jsonl")


def trace(mix: Mix, path: Path, seed: int) -> tuple[Arrival, ...]:
    """Read lines such as ``{"at_s": 1.5, "class": "small"}``. A missing class is drawn. ValueError for other lines."""
    random, arrivals = Random(seed), []
    for number, line in enumerate(path.read_text().splitlines()):
        entry = json.loads(line)
        unknown = set(entry) - {"at_s", "class"}
        if unknown or not isinstance(entry.get("at_s"), int | float):
            raise ValueError(f"{path}, line {number + 1}: {line}; it must be {{'at_s': seconds, 'class': name}}")
        kind = mix.named(entry["class"]) if "class" in entry else mix.drawn(random)
        arrivals.append(Arrival(at_s=float(entry["at_s"]), kind=kind, seed=number))
    return tuple(sorted(arrivals, key=lambda one: one.at_s))


def owned(arrivals: Sequence[Arrival], owners: Owners, seed: int) -> tuple[Arrival, ...]:
    """Return the same arrivals, each with one of ``owners``."""
    drawn = owners.drawn(len(arrivals), seed)
    return tuple(replace(one, owner=owner) for one, owner in zip(arrivals, drawn, strict=True))


def _drawn(mix: Mix, times: tuple[float, ...], random: Random) -> tuple[Arrival, ...]:
    return tuple(Arrival(at_s=at_s, kind=mix.drawn(random), seed=seed) for seed, at_s in enumerate(times))
