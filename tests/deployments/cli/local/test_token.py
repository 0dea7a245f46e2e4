"""The token of our own cluster has an owner, is private, and has a place even without a home directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments.cli.local import token_files, token_problem, token_variables


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    return home


def test_a_new_one_is_its_owner_s_alone(home: Path, tmp_path: Path) -> None:
    assert token_variables({}, tmp_path) == {}
    file = home / ".ray" / "auth_token"
    assert len(file.read_text()) == 64
    assert [path.stat().st_mode & 0o777 for path in (file.parent, file)] == [0o700, 0o600]


def test_one_that_is_there_stays_and_is_closed(home: Path, tmp_path: Path) -> None:
    file = home / ".ray" / "auth_token"
    file.parent.mkdir()
    file.write_text("mine")
    file.chmod(0o644)
    assert token_files({}) == [file]
    assert token_variables({}, tmp_path) == {}
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("mine", 0o600)


def test_without_a_home_that_can_be_written_it_goes_with_the_cluster(home: Path, tmp_path: Path) -> None:
    (home / ".ray").touch()  # refused even to root
    file = tmp_path / "auth_token"
    assert token_variables({}, tmp_path) == {"RAY_AUTH_TOKEN_PATH": str(file)}
    assert file.stat().st_mode & 0o777 == 0o600
    token = file.read_text()
    file.unlink()
    token_variables({}, tmp_path)
    assert file.read_text() == token, "Ray reads it once in the life of a process"


def test_what_the_environment_says_counts(home: Path, tmp_path: Path) -> None:
    for variables in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN": "a"}, {"RAY_AUTH_TOKEN_PATH": "a"}):
        assert token_variables(variables, tmp_path) == {}
    assert not (home / ".ray").exists()


def test_a_file_without_a_token_is_named(tmp_path: Path) -> None:
    file = tmp_path / "token"
    variables = {"RAY_AUTH_TOKEN_PATH": str(file)}
    for reason in ("no such file or directory", "it is empty"):
        problem = token_problem(variables)
        assert problem is not None
        assert f"RAY_AUTH_TOKEN_PATH names {file}, which holds no token ({reason})" in problem
        file.touch()
    assert token_problem({**variables, "RAY_AUTH_MODE": "disabled"}) is None
    file.write_text("a token")
    assert token_problem(variables) is None
