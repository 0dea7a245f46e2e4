"""Owners of requests: API keys, their shares of the load, and their weights at the server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator

from benchmarks.load.mix import known_file
from deployments.cli.serving import parse_config
from deployments.config import ServeConfig
from deployments.usage.api_keys import hash_of

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
