"""The only module that reads the environment: secrets and folders. All other settings are in the YAML config."""

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
    """Variables ``TROUPE_*``."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="ignore")

    api_keys: SecretStr = SecretStr("")
    """Accepted keys, comma-separated. Without these and a file, no key is needed."""
    api_keys_file: Path | None = None
    """Further accepted keys, one per line."""
    api_key: SecretStr = SecretStr("")
    """The key that the command line sends."""
    data_dir: Path = Field(default_factory=lambda: _home() / ".local" / "share" / "troupe")
    kernel_cache: str = ""
    """Folder or URL of object storage in which nodes share compiled kernels; by default each node has its own."""
    database_url: str = ""
    """URL of a PostgreSQL or SQLite database; by default ``api.database`` of the configuration, or SQLite in the data
    directory."""

    def key_ring(self) -> KeyRing:
        """Return the accepted keys. ValueError if a setting is present but holds no key."""
        text = self.api_keys.get_secret_value()
        keys = [key.strip() for key in text.split(",") if key.strip()]
        if text and not keys:
            raise ValueError("TROUPE_API_KEYS holds no key; write some, with commas between, or unset it")
        return KeyRing(keys, self.api_keys_file)

    @staticmethod
    def secret(name: str) -> str:
        """Return the secret in the variable ``name``, which the configuration names. ValueError if it holds none."""
        if not (secret := os.environ.get(name, "").strip()):
            raise ValueError(f"the environment variable {name} is not set, whose name the configuration has: set it")
        if not (secret.isascii() and secret.isprintable()):
            raise ValueError(f"the environment variable {name} holds no key: a key is one line of ASCII characters")
        return secret

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
"""Make Ray's processes listen on 127.0.0.1 only, as Ray itself does on the named systems. Read when Ray is imported."""


def set_defaults(variables: Mapping[str, str]) -> None:
    """Set the variables that are not set yet, for this process and its children."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def process_environment() -> dict[str, str]:
    """Return a copy of this process's variables."""
    return dict(os.environ)


@contextmanager
def variables_set(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set ``variables`` inside the block (None unsets one), for this process and its children."""
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
    """Unset all ``TROUPE_*`` variables inside the block: a temporary application must not use keys or a database."""
    names = [name for name in os.environ if name.upper().startswith(PREFIX)]
    before = {name: os.environ.pop(name) for name in names}
    try:
        yield
    finally:
        os.environ.update(before)
