"""What the environment says: keys, places, the database."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deployments.cli import progress
from deployments.cli.serving import load_config
from deployments.config import ServeConfig
from deployments.settings import Settings


def test_without_keys_nobody_is_asked_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TROUPE_API_KEYS", "TROUPE_API_KEYS_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert Settings().all_api_keys == ()


def test_keys_of_the_environment_and_of_a_file_add_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("from-file\n\n  spaced  \n")
    monkeypatch.setenv("TROUPE_API_KEYS", "one, two,")
    monkeypatch.setenv("TROUPE_API_KEYS_FILE", str(file))
    settings = Settings()
    assert settings.all_api_keys == ("one", "two", "from-file", "spaced")
    assert "one" not in repr(settings), "keys stay out of logs"


def test_a_key_file_that_cannot_be_read_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TROUPE_API_KEYS_FILE", str(tmp_path / "missing"))
    with pytest.raises(FileNotFoundError):
        _ = Settings().all_api_keys


def test_places_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TROUPE_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("TROUPE_DATABASE_URL", "postgresql+asyncpg://host/name")
    settings = Settings()
    assert (settings.data_dir, settings.database_url) == (tmp_path, "postgresql+asyncpg://host/name")


def test_an_application_for_one_command_has_neither_keys_nor_jobs_of_the_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TROUPE_API_KEYS", "one")
    monkeypatch.setenv("TROUPE_API_KEYS_FILE", str(tmp_path / "missing"))
    monkeypatch.setenv("TROUPE_DATABASE_URL", "postgresql+asyncpg://host/name")

    @contextmanager
    def started(config: ServeConfig) -> Iterator[str]:
        settings = Settings()
        assert (settings.all_api_keys, settings.database_url) == ((), "")
        yield "url"

    monkeypatch.setattr(progress, "started", started)
    with progress.started_for_itself(load_config("laptop")) as url:
        assert url == "url"
    assert Settings().database_url == "postgresql+asyncpg://host/name", "as before"
