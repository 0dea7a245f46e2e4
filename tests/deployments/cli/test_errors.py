"""Errors end a command with the right exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deployments.names import own_version
from tests.deployments.support.commands import assert_one_line, troupe
from tests.support.fenced import ROOT

PROGRAM = """
import sys, typer
from deployments.cli.errors import errors
try:
    with errors():
        {}
except typer.Exit as ended:
    sys.exit(ended.exit_code)
"""

AGAIN = "import atexit, os, signal; atexit.register(lambda: [os.kill(os.getpid(), signal.SIGINT), range(9)])"
"""A second Ctrl-C, while the interpreter ends."""


@pytest.mark.parametrize(
    ("ends_by", "code"),
    [
        ("raise KeyboardInterrupt", 130),
        ("exec('raise KeyboardInterrupt')", 130),  # as in a dataclass under construction during an import
        (f"{AGAIN}; raise KeyboardInterrupt", 130),
        ("raise ValueError('no such size')", 2),
        ("raise KeyError('ours')", 1),
    ],
)
def test_exit_code(ends_by: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.format(ends_by))
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    ended = subprocess.run([sys.executable, "-m", "program"], env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == code, ended.stderr
    assert ("Traceback" in ended.stderr) == (code == 1)
    assert code != 2 or ended.stderr == "troupe: no such size\n"


def test_the_version_is_told() -> None:
    result = troupe("--version")
    assert (result.exit_code, result.output) == (0, f"troupe {own_version()}\n")


def test_what_is_not_installed_is_told_with_the_extra_that_has_it() -> None:
    program = "import sys; sys.modules['onnx_ir'] = None\nfrom deployments.cli.main import app; app(sys.argv[1:])"
    command = [sys.executable, "-c", program, "build-engine", "--model", "flux-shapes"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    (line,) = refused.stderr.splitlines()
    assert refused.returncode == 2
    assert line.startswith("troupe: onnx_ir is not installed")
    assert "pip install '.[export]'" in line


CALIBRATE = ("calibrate", "--model", "flux-shapes", "--out", "scales.json", "--prompts")
GENERATE = ("generate", "a", "--out", "a.png", "--url", "http://127.0.0.1:9")


@pytest.mark.parametrize("command", [("show",), CALIBRATE, (*GENERATE, "--api-key-file"), (*GENERATE, "--image")])
def test_a_file_that_cannot_be_read_is_named(command: tuple[str, ...], tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "gone", "No such file or directory"), (tmp_path, "Is a directory")):
        result = troupe(*command, str(path))
        assert_one_line(result, str(path), reason)
        assert "Errno" not in result.stderr


@pytest.mark.parametrize("command", [("serve",), ("doctor", "--config"), ("models", "--config"), CALIBRATE])
def test_a_file_that_is_no_text_is_named(command: tuple[str, ...], tmp_path: Path) -> None:
    (file := tmp_path / "file").write_bytes(b"PK\xff")
    assert_one_line(troupe(*command, str(file)), f"{file} is not text in UTF-8")


def test_a_server_without_its_keys_does_not_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TROUPE_API_KEYS_FILE", str(tmp_path / "keys"))
    assert_one_line(troupe("serve"), f"the key file {tmp_path / 'keys'} cannot be read")


def test_a_file_without_the_key_to_send_is_told(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("# none yet\n")
    wanted = ("--url", "http://127.0.0.1:9", "--api-key-file", str(tmp_path / "key"))
    assert_one_line(troupe("models", *wanted), "holds no key; write one a line")
