"""``serve`` and ``doctor`` report problems of the environment in one line before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments.cli.preflight import environment_problems, open_to_others
from deployments.cli.serving import load_config
from tests.deployments.support.commands import assert_one_line, troupe


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TROUPE_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", "/tmp")
    return tmp_path / "data"


def problems() -> list[str]:
    return list(environment_problems(load_config("laptop")))


def test_nothing_is_wrong_and_nothing_is_made(data: Path) -> None:
    assert problems() == []
    assert not data.exists()


@pytest.mark.parametrize("name", ["", "videos", "files", "answers", "servers"])
def test_a_data_directory_that_refuses_to_be_written(data: Path, name: str) -> None:
    """The kernel lets not even root write to a folder of /proc."""
    if name:
        data.mkdir()
        (data / name).symlink_to("/proc/self")
    else:
        data.symlink_to("/proc/self")
    (problem,) = problems()
    assert str(data / name) in problem
    assert "set TROUPE_DATA_DIR to another folder" in problem
    assert_one_line(troupe("serve", "laptop", "--port", "0", "--metrics-port", "0"), str(data), "cannot be written")
    for config in (["--config", "laptop"], *([[]] if not name else [])):
        doctor = troupe("doctor", *config)
        assert doctor.exit_code == 1
        assert "cannot be written" in " ".join(doctor.output.replace("│", " ").split())


def test_all_that_is_wrong_is_said_at_once(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data.symlink_to("/proc/self")
    monkeypatch.setenv("RAY_TMPDIR", f"/tmp/{'a' * 60}")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/nowhere/token")
    monkeypatch.setenv("TROUPE_API_KEYS_FILE", "/nowhere/keys")
    assert [problem.split()[0] for problem in problems()] == ["the", str(data), "RAY_TMPDIR", "RAY_AUTH_TOKEN_PATH"]


def test_an_environment_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("TROUPE_DATA_DIR", raising=False)
    monkeypatch.setattr(Path, "home", home)
    assert problems() == ["this user has no home folder: set TROUPE_DATA_DIR, for clips and pictures"]


def test_what_others_can_read_is_told(data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    (tmp_path / "token").touch(0o600)
    data.mkdir(0o755)
    for name in ("videos", "answers"):
        (data / name).mkdir(0o700)
    assert open_to_others() == []
    for name in ("videos", "answers"):
        (data / name).chmod(0o755)
    (data / "jobs.sqlite3").touch(0o644)
    (tmp_path / "token").chmod(0o640)
    assert open_to_others() == [data / "videos", data / "answers", data / "jobs.sqlite3", tmp_path / "token"]
    data.chmod(0o700)
    assert open_to_others() == [tmp_path / "token"], "the folder is closed"
