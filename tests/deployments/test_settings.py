"""The environment has keys, places and the database."""

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
    assert not Settings().key_ring()


def test_keys_of_the_environment_and_of_a_file_add_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("from-file\n\n  spaced  \n")
    monkeypatch.setenv("TROUPE_API_KEYS", "one, two,")
    monkeypatch.setenv("TROUPE_API_KEYS_FILE", str(file))
    settings = Settings()
    ring = settings.key_ring()
    assert [key for key in ("one", "two", "from-file", "spaced", "", "on") if ring.find(key)] == [
        "one",
        "two",
        "from-file",
        "spaced",
    ]
    assert "one" not in repr(settings), "keys stay out of logs"


@pytest.mark.parametrize(
    ("value", "message"), [(None, "is not set"), (" \n", "is not set"), ("a\nb", "holds no key"), ("ä", "holds no key")]
)
def test_a_variable_without_a_key_is_an_error(monkeypatch: pytest.MonkeyPatch, value: str | None, message: str) -> None:
    monkeypatch.delenv("MINE", raising=False)
    if value is not None:
        monkeypatch.setenv("MINE", value)
    with pytest.raises(ValueError, match=f"the environment variable MINE {message}"):
        Settings.secret("MINE")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "holds no key; write one a line"),
        (b"# one\n\n  # two\n", "holds no key; write one a line"),
        (b"\xff\xfe", "is not text in UTF-8"),
    ],
    ids=["missing", "empty", "comments", "binary"],
)
def test_a_key_file_without_keys_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes | None, message: str
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setenv("TROUPE_API_KEYS_FILE", str(file))
    with pytest.raises(ValueError, match=f"the key file {file} {message}"):
        Settings().key_ring()


def test_a_list_of_keys_without_any_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROUPE_API_KEYS", " ,")
    with pytest.raises(ValueError, match="TROUPE_API_KEYS holds no key"):
        Settings().key_ring()


def test_the_key_to_send_comes_from_a_file_or_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert Settings().own_key(None) == ""
    monkeypatch.setenv("TROUPE_API_KEY", "from-environment")
    assert Settings().own_key(None) == "from-environment"
    file = tmp_path / "key"
    file.write_text("# mine\nfrom-file\n")
    assert Settings().own_key(file) == "from-file"
    file.write_text("one\ntwo\n")
    with pytest.raises(ValueError, match="holds 2 keys; a client sends one"):
        Settings().own_key(file)


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
        assert (bool(settings.key_ring()), settings.database_url) == (False, "")
        yield "url"

    monkeypatch.setattr(progress, "started", started)
    with progress.started_temporarily(load_config("laptop")) as url:
        assert url == "url"
    assert Settings().database_url == "postgresql+asyncpg://host/name", "the environment is restored"
