"""The one file that reads the environment. Secrets and places come from here; everything else from the YAML config."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from deployments.usage.api_keys import KeyRing, read_keys

PREFIX = "TROUPE_"


class Settings(BaseSettings):
    """Variables ``TROUPE_*``.

    ``TROUPE_API_KEYS`` (comma-separated) and ``TROUPE_API_KEYS_FILE`` (one key a line) are added up; with neither, no
    key is asked for. ``TROUPE_API_KEY`` is what the command line sends. ``TROUPE_DATABASE_URL`` is an SQLAlchemy async
    URL; by default SQLite inside the data directory.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="ignore")

    api_keys: SecretStr = SecretStr("")
    api_keys_file: Path | None = None
    api_key: SecretStr = SecretStr("")
    data_dir: Path = Field(default_factory=lambda: _home() / ".local" / "share" / "troupe")
    database_url: str = ""

    def key_ring(self) -> KeyRing:
        """Return the accepted keys. ValueError if there is none where one was announced."""
        text = self.api_keys.get_secret_value()
        keys = [key.strip() for key in text.split(",") if key.strip()]
        if text and not keys:
            raise ValueError("TROUPE_API_KEYS holds no key; write some, with commas between, or unset it")
        return KeyRing(keys, self.api_keys_file)

    def own_key(self, file: Path | None) -> str:
        """Return the key to send: the one in ``file``, else ``TROUPE_API_KEY``. ValueError if the file has several."""
        if file is None:
            return self.api_key.get_secret_value().strip()
        keys = read_keys(file)
        if len(keys) > 1:
            raise ValueError(f"{file} holds {len(keys)} keys; a client sends one")
        return keys[0]


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:
        raise ValueError("this user has no home folder: set TROUPE_DATA_DIR, for clips and pictures") from None


ON_ONE_MACHINE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Read when Ray is imported. Its name tells where Ray sets it by itself: its processes listen on 127.0.0.1 alone."""


def set_defaults(variables: Mapping[str, str]) -> None:
    """Set those that this process has not, for itself and all that it starts."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def process_environment() -> dict[str, str]:
    """Return a copy of all variables of this process, for what must pass some of them on."""
    return dict(os.environ)


@contextmanager
def variables_set(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set ``variables`` inside the block (None unsets one), for this process and all that it starts."""
    before = {name: os.environ.get(name) for name in variables}
    try:
        _set(variables)
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def settings_unset() -> Iterator[None]:
    """Unset all ``TROUPE_*`` variables inside the block: for an application that is nobody's but the block's.

    With the server's own it would ask for keys that nobody gave it, and take clips from the database.
    """
    names = [name for name in os.environ if name.upper().startswith(PREFIX)]
    held = {name: os.environ.pop(name) for name in names}
    try:
        yield
    finally:
        os.environ.update(held)
