"""Whose requests they are: API keys, how much of the load each sends, and how much it may have beside the others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator

from deployments.cli.serving import parse_config
from deployments.config import ServeConfig
from deployments.usage.api_keys import hash_of

OWNERS = Path(__file__).parent / "owners"
NOBODY = "none"
"""No keys: all requests are anybody's."""
NUM_DIGITS = 16
"""Of the hash of a key, in a configuration."""


class Owner(BaseModel):
    """``share`` of the requests and ``weight`` at the server count beside those of the others."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(pattern="^[a-z0-9_]+$")]
    share: Annotated[float, Field(gt=0)] = 1.0
    weight: Annotated[float, Field(gt=0)] = 1.0

    @property
    def key(self) -> str:
        """Its API key: of a server that is there for a benchmark, on this machine, and for nothing else."""
        return f"benchmark-{self.name}"

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}


class Owners(BaseModel):
    """Those who send a load; none where the server asks for no keys."""

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
        """Of a request that is nobody's in particular."""
        return self.owners[0].headers if self.owners else {}

    def drawn(self, num: int, seed: int) -> Sequence[Owner | None]:
        """Returns the owners of ``num`` requests, by their shares. A seed of arrivals gives the same arrivals, whoever
        owns them."""
        if not self.owners:
            return [None] * num
        return Random(f"owners {seed}").choices(self.owners, [one.share for one in self.owners], k=num)

    def with_weights(self, config: ServeConfig) -> ServeConfig:
        """Returns ``config`` with the weights of all keys."""
        document = config.model_dump(mode="json")
        limits = [{"key": hash_of(one.key)[:NUM_DIGITS], "weight": one.weight} for one in self.owners]
        document["applications"][0]["args"]["api"]["key_limits"] = limits
        return parse_config(document)


def load_owners(name: str) -> Owners:
    """Reads a file, or one of those that lie beside this by its bare name; NOBODY are none. ValueError says what is
    wrong with it."""
    if name == NOBODY:
        return Owners()
    path = Path(name) if Path(name).is_file() else OWNERS / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join([NOBODY, *sorted(file.stem for file in OWNERS.glob("*.yaml"))])
        raise ValueError(f"{name} is neither a file of owners nor known; known: {known}")
    return Owners.model_validate(yaml.safe_load(path.read_text()))
