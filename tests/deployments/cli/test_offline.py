"""Some commands need no server, and mistakes give one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deployments.cli.errors import explain
from deployments.config import CONFIGS
from tests.deployments.support.commands import COMMAND, assert_one_line, config_file, troupe
from tests.deployments.support.live import config_of
from tests.support.patience import PATIENCE_S


def test_help_names_every_command_and_loads_nothing_heavy() -> None:
    code = "import sys; from deployments.cli.main import app; app(['--help'], standalone_mode=False); "
    code += "sys.exit(sum(name in sys.modules for name in ('torch', 'ray', 'diffusers')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    for name in ("generate", "serve", "models", "estimate", "doctor", "demo"):
        assert f" {name} " in done.stdout


@pytest.mark.parametrize("name", ["generate", "serve", "models", "estimate", "doctor", "demo"])
def test_every_command_explains_itself(name: str) -> None:
    result = troupe(name, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_without_a_command_it_shows_the_help() -> None:
    assert "Usage" in troupe().output


def test_doctor_says_what_is_here_and_what_can_run() -> None:
    result = troupe("doctor")
    assert result.exit_code == 0
    for subject in ("Python", "ray", "torch", "diffusers", "engine torch", "engine tensorrt"):
        assert subject in result.output


def test_models_of_a_config(pictures: Path, clips: Path, tmp_path: Path) -> None:
    config = config_file(config_of({"small-pictures": pictures, "small-clips": clips}), tmp_path)
    result = troupe("models", "--config", config)
    assert result.exit_code == 0, result.output
    assert "small-pictures" in result.output
    assert "64x64" in result.output
    assert "small-clips" in result.output


def test_an_unknown_config_is_one_line() -> None:
    assert_one_line(troupe("serve", "desktop"), "desktop", "gpu1, gpu2, gpu4, gpu8, laptop")


def test_a_config_with_an_unknown_key_names_it(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"{(CONFIGS / 'laptop.yaml').read_text()}\nnum_gangs: 2\n")
    assert_one_line(troupe("models", "--config", str(path)), "num_gangs")


def test_a_config_that_is_no_yaml_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("applications: [")
    assert_one_line(troupe("models", "--config", str(path)), str(path))


def test_a_server_that_does_not_answer_is_one_line() -> None:
    assert_one_line(troupe("models", "--url", "http://127.0.0.1:9"), "http://127.0.0.1:9")


def test_an_error_of_the_system_is_one_line() -> None:
    assert explain(PermissionError(13, "Permission denied", "a.png")) == "a.png: Permission denied"
    assert explain(IsADirectoryError(21, "Is a directory", ".a.png.01", None, "a.png")) == "a.png: Is a directory"
    assert explain(OSError(28, "No space left on device")) == "No space left on device"
    assert explain(OSError("the hub has no such file")) == "the hub has no such file"
    assert explain(KeyError("ours")) is None


def test_the_command_is_installed() -> None:
    done = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True, timeout=PATIENCE_S)
    assert "Usage: " in done.stdout


@pytest.mark.parametrize("command", [("generate", "a circle", "--out", "file/x.png"), ("demo", "--out", "file")])
def test_results_that_nothing_can_hold_are_refused_before_a_server_starts(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "x.png").mkdir()
    assert_one_line(troupe(*command), str(tmp_path / "file"))
    assert_one_line(troupe("generate", "a circle", "--out", "x.png"), "x.png")
