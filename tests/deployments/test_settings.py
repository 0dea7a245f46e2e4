"""What the environment says: keys, places, the database."""

from __future__ import annotations

from pathlib import Path

import pytest

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
