"""The shipped unit for systemd has our command, leaves the server time to end, and runs in systemd."""

from __future__ import annotations

import configparser
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.cli.preflight import environment_problems
from deployments.cli.serving import end_limit_s, load_config
from deployments.door.door_settings import DoorSettings
from deployments.forked_workers import END_WITHIN_S
from tests.deployments.support.commands import assert_one_line, config_file, troupe
from tests.deployments.support.live import config_of, is_healthy, picture, wait_until
from tests.support.fenced import ROOT
from tests.support.patience import PATIENCE_S
from tests.support.ports import own_port
from tests.support.systemd import NoSystemd, Systemd, systemd

UNIT = ROOT / "troupe.service"


class Unit(configparser.RawConfigParser):
    """A unit's file (systemd.syntax(7)): names keep their case, and may occur several times."""

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
    """``%S`` and ``%C`` are in a writable folder."""
    lines = [line.partition("=")[2] for line in UNIT.read_text().splitlines() if line.startswith("Environment=")]
    for name, _, value in (setting.partition("=") for line in lines for setting in line.split()):
        monkeypatch.setenv(name, value.replace("%S", str(tmp_path)).replace("%C", str(tmp_path)))
    assert list(environment_problems(load_config("laptop"))) == []


def test_systemd_reads_it(tmp_path: Path) -> None:
    """The program must exist for it."""
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


OURS = """\
[Service]
User=
ExecStart=
ExecStart={python} -m deployments.cli.main serve {config} --port {port}
Environment=PYTHONPATH={root} HF_HUB_OFFLINE=1 COLUMNS=200
StandardOutput=append:{folder}/log
StandardError=inherit
ExecStopPost=sh -c 'echo "$SERVICE_RESULT $EXIT_CODE $EXIT_STATUS" >> {folder}/ends'
"""
"""The program and its user are the test's own. All else is as shipped."""


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Systemd]:
    """Run systemd with our unit, for a server of one of the laptop's models at ``own_port("systemd")``."""
    units = tmp_path / "units"
    (units / f"{UNIT.name}.d").mkdir(parents=True)
    shutil.copy(UNIT, units)
    shapes = ROOT / "pipelines/checkpoints/flux-shapes"
    config = config_file(config_of({"flux-shapes": shapes}), tmp_path)
    values = {"python": sys.executable, "config": config, "port": own_port("systemd"), "root": ROOT}
    (units / f"{UNIT.name}.d" / "test.conf").write_text(OURS.format(**values, folder=tmp_path))
    try:
        with systemd(units) as running:
            yield running
    except NoSystemd as reason:
        pytest.skip(str(reason))


@pytest.mark.slow
def test_systemd_starts_restarts_and_ends_it(manager: Systemd, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{own_port('systemd')}"

    def is_ready() -> bool:
        assert manager.shown(UNIT.name, "ActiveState") in ("active", "activating"), (tmp_path / "log").read_text()
        return is_healthy(url)

    manager.control("start", UNIT.name)
    wait_until(is_ready, "it is ready", patience_s=3 * PATIENCE_S)
    before = picture(url, seed=1)
    manager.control("kill", "--kill-whom=main", "--signal=KILL", UNIT.name)
    wait_until(lambda: manager.shown(UNIT.name, "NRestarts") == "1", "it is started again")
    wait_until(is_ready, "it is ready again", patience_s=3 * PATIENCE_S)
    assert picture(url, seed=1) == before
    assert len(manager.processes(UNIT.name)) > 5, "Ray's processes and the replicas belong to it"
    manager.control("stop", UNIT.name)
    # It ends by SIGTERM, which the unit calls a success.
    assert (tmp_path / "ends").read_text().splitlines() == ["signal killed KILL", "success exited 143"]
    assert manager.shown(UNIT.name, "ActiveState") == "inactive"
    assert manager.processes(UNIT.name) == []
