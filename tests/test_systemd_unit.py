"""The unit that is shipped for systemd: its command is one of ours, and it leaves the server the time to end."""

from __future__ import annotations

import configparser
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deployments.cli.preflight import environment_problems
from deployments.cli.serving import end_limit_s, load_config
from deployments.door.door_settings import DoorSettings
from deployments.forked_workers import END_WITHIN_S
from tests.deployments.support.commands import assert_one_line, troupe
from tests.support.fenced import ROOT

UNIT = ROOT / "troupe.service"


class Unit(configparser.RawConfigParser):
    """A unit's file (systemd.syntax(7)): names are as they are written, and may come several times."""

    def optionxform(self, optionstr: str) -> str:
        return optionstr


@pytest.fixture
def unit() -> Unit:
    unit = Unit(strict=False, delimiters=("=",), comment_prefixes=("#",))
    unit.read(UNIT)
    return unit


def test_its_command_is_ours(unit: Unit) -> None:
    program, *args = shlex.split(unit["Service"]["ExecStart"])
    assert Path(program).name == "troupe"
    assert args[0] == "serve"
    assert_one_line(troupe(*args), "/etc/troupe/config.yaml is neither a file nor a shipped config")


def test_it_leaves_the_server_the_time_to_end(unit: Unit) -> None:
    service = unit["Service"]
    assert service["KillMode"] == "mixed", "Ray's processes end when the server has drained"
    assert float(service["TimeoutStopSec"]) > end_limit_s(DoorSettings().drain_s) + END_WITHIN_S
    assert "143" in service["SuccessExitStatus"].split()


def test_its_environment_is_one_to_serve_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With ``%S`` and ``%C`` in a folder that can be made here."""
    lines = [line.partition("=")[2] for line in UNIT.read_text().splitlines() if line.startswith("Environment=")]
    for name, _, value in (setting.partition("=") for line in lines for setting in line.split()):
        monkeypatch.setenv(name, value.replace("%S", str(tmp_path)).replace("%C", str(tmp_path)))
    assert list(environment_problems(load_config("laptop"))) == []


def test_systemd_reads_it(tmp_path: Path) -> None:
    """The program must be there for it."""
    if (verify := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd-analyze is not installed (Debian: apt-get install systemd)")
    program = tmp_path / "troupe"
    program.symlink_to(sys.executable)
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/troupe/.venv/bin/troupe", str(program)))
    read = subprocess.run(
        [verify, "verify", "--man=no", str(copy)], capture_output=True, text=True, env=os.environ | {"LC_ALL": "C"}
    )
    about_it = [line for line in (read.stdout + read.stderr).splitlines() if UNIT.name in line]
    assert about_it == []
    assert read.returncode == 0, read.stderr
