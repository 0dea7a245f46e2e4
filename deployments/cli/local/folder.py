"""A folder of its own for a cluster on this machine, closed to other users and gone with the cluster."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from deployments.places import refusal

PREFIX, LOCK, RAYS = "tr_", "lock", "r"
"""Names are short for the sake of sockets. Ray opens its folder to all users, so that lies inside a closed one."""
MAX_SOCKET_BYTES = 107
"""Of the path of a socket (``sun_path`` in unix(7))."""
RANDOM_CHARS = 8
"""What ``mkdtemp`` adds to a prefix."""

logger = logging.getLogger("troupe.serving")


@contextmanager
def own_folder(variables: Mapping[str, str]) -> Iterator[Path]:
    """Yield a new folder for one cluster, below the one that the environment's ``variables`` name.

    It is deleted at the end. After a failure it stays, with its logs, until the next cluster starts.
    """
    _, base = base_folder(variables)
    base.mkdir(parents=True, exist_ok=True)
    _sweep(base)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
    with (folder / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield folder
        except Exception:
            logger.warning("logs of the cluster that failed are in %s until the next start", folder)
            raise
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)


def base_folder(variables: Mapping[str, str]) -> tuple[str, Path]:
    """Return where Ray's temporary files belong, after the variable that says so; that is empty for the default."""
    for name in ("RAY_TMPDIR", "TMPDIR"):
        if value := variables.get(name):
            return name, Path(value).absolute()
    return "", Path("/tmp")


def folder_problem(variables: Mapping[str, str]) -> str | None:
    """Return why no cluster can have its folder where ``variables`` say, and what to change; None if it can."""
    name, base = base_folder(variables)
    named = f"{name} is {base}" if name else str(base)
    too_long = len(os.fsencode(_longest_socket(base))) - MAX_SOCKET_BYTES
    if too_long > 0:
        return (
            f"{named}, which is {too_long} bytes too long: Ray's sockets lie there, and the path of a socket "
            f"has at most {MAX_SOCKET_BYTES} bytes; set RAY_TMPDIR to a shorter folder, such as /tmp"
        )
    if reason := refusal(base):
        return f"{named}, for Ray's files: {reason}; set RAY_TMPDIR to a short path that can be written"
    return None


def _longest_socket(base: Path) -> Path:
    session = f"session_2026-01-01_00-00-00_000000_{os.getpid()}"
    return base / f"{PREFIX}{'x' * RANDOM_CHARS}" / RAYS / session / "sockets" / "plasma_store"


def _sweep(base: Path) -> None:
    """Delete folders of this user's whose server was killed, or has failed."""
    for lock in base.glob(f"{PREFIX}*/{LOCK}"):
        try:
            if lock.stat().st_uid != os.geteuid():
                continue
            with lock.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:  # it is in use, or just gone
            continue
