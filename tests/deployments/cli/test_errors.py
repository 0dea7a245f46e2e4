"""What ends a command, and with which exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(
    ("ends_by", "code"),
    [
        ("raise KeyboardInterrupt", 130),
        ("exec('raise KeyboardInterrupt')", 130),  # as in a dataclass that an import is just making
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
