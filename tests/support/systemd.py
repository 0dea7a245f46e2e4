"""A systemd for a test: process 1 of new namespaces, which knows the units of one folder only."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.patience import PATIENCE_S
from tests.support.processes import paths_in

SYSTEMD = Path("/lib/systemd/systemd")
TARGETS = ("sysinit", "basic", "shutdown", "network-online")
"""Units that services depend on by default, and those that ours wants. Here they do nothing."""
INSIDE = """
mount --make-rprivate /
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /var/lib
mount -t tmpfs tmpfs /var/cache
umount -R -l /sys/fs/cgroup
mount -t cgroup2 none /sys/fs/cgroup
exec env -i container=test "PATH=$PATH" "SYSTEMD_UNIT_PATH=$1" "$2" --system --unit=basic.target --show-status=0
"""
"""Folders of the machine's own systemd and of services are hidden; the rest, /tmp too, is the machine's."""


class NoSystemd(Exception):
    """systemd cannot run here. The text says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Systemd:
    """A running manager. ``group`` is the cgroup of its own groups."""

    pid: int
    group: Path

    def control(self, *args: str) -> str:
        """Return the output of ``systemctl ARGS``. Raise AssertionError if it fails."""
        inside = ("nsenter", f"--target={self.pid}", "--mount", "--pid", "--cgroup", "--uts", "--ipc")
        done = subprocess.run([*inside, "systemctl", *args], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def shown(self, unit: str, name: str) -> str:
        """Return a property of a unit."""
        return self.control("show", unit, f"--property={name}", "--value").strip()

    def processes(self, unit: str) -> list[int]:
        """Return the processes of a unit, as this namespace numbers them."""
        return list(_members(self.group / "system.slice" / unit))


@contextmanager
def systemd(units: Path) -> Iterator[Systemd]:
    """Run systemd with the units in the folder ``units``. All of its processes end with the block.

    Raise NoSystemd if programs or rights are missing.
    """
    for program in (str(SYSTEMD), "systemctl", "unshare", "nsenter"):
        if shutil.which(program) is None:
            raise NoSystemd(f"{program} is not installed (Debian: apt-get install systemd)")
    if os.getuid() != 0:
        raise NoSystemd("only root may start systemd in namespaces")
    for target in TARGETS:
        (units / f"{target}.target").write_text("[Unit]\nDefaultDependencies=no\n")
    with _cgroup() as group:
        command = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--cgroup", "--uts", "--ipc")
        shell = ("bash", "-ec", INSIDE, "inside", str(units), str(SYSTEMD))
        with (units / "systemd.log").open("w") as log:
            process = subprocess.Popen(
                [*command, *shell],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=lambda: (group / "cgroup.procs").write_text(str(os.getpid())),
            )
        try:
            yield _start(process, group, units)
        finally:
            process.kill()
            process.wait()


def _start(process: subprocess.Popen[bytes], group: Path, units: Path) -> Systemd:
    end_s = time.monotonic() + PATIENCE_S
    while process.poll() is None and time.monotonic() < end_s:
        for child in psutil.Process(process.pid).children():
            manager = Systemd(pid=child.pid, group=group)
            with suppress(AssertionError):
                manager.control("is-system-running")
                return manager
        time.sleep(0.1)
    raise NoSystemd(f"systemd does not start: {(units / 'systemd.log').read_text() or 'it says nothing'}")


@contextmanager
def _cgroup() -> Iterator[Path]:
    """Yield a new cgroup of version 2 below this process's own. Kill what is in it at the end."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    places = [Path(fields[1]) for fields in mounts if fields[2] == "cgroup2"]
    own = [line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")]
    if not places or not own:
        raise NoSystemd("no cgroups of version 2 are mounted here")
    group = places[0] / own[0].lstrip("/") / f"test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        raise NoSystemd(f"no cgroup can be made here: {error}") from error
    try:
        yield group
    finally:
        _remove(group)


def _members(group: Path) -> Iterator[int]:
    """Yield the processes in a cgroup and those below it, which systemd may delete meanwhile."""
    for file in paths_in(group):
        if file.name == "cgroup.procs":
            with suppress(OSError):
                yield from map(int, file.read_text().split())


def _remove(group: Path) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while group.exists() and time.monotonic() < end_s:
        for pid in _members(group):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for folder in sorted((path for path in paths_in(group) if path.is_dir()), reverse=True):
            with suppress(OSError):
                folder.rmdir()
        with suppress(OSError):
            group.rmdir()
        time.sleep(0.1)
