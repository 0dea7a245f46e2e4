"""Whether folders can be written, and folders and files that other users of the machine cannot read."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from engines.core.storage import write_atomically

PRIVATE_FILE = 0o600
OTHERS = 0o077
"""Permissions of all users but the owner."""


def refusal(folder: Path) -> str | None:
    """Return why nothing can be written in ``folder``, or why it cannot be made; None if it can. Leave no trace."""
    nearest = next((each for each in (folder, *folder.absolute().parents) if os.path.exists(each)), Path("/"))
    try:
        with tempfile.TemporaryFile(dir=nearest):
            return None
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        told = f"{nearest} cannot be written ({reason})"
        return told if nearest == folder else f"{folder} cannot be made: {told}"


def file_refusal(file: Path) -> str | None:
    """Return why ``file``, which may not be there, cannot be written; None if it can."""
    if not os.path.exists(file):
        return refusal(file.parent)
    return None if os.access(file, os.R_OK | os.W_OK) else f"{file} belongs to another user, or cannot be written"


def is_open_to_others(path: Path) -> bool:
    """Return whether other users may do something with ``path``; False if it is not there."""
    with suppress(OSError):
        return bool(path.stat().st_mode & OTHERS)
    return False


def make_folder(folder: Path) -> None:
    """Make ``folder``, which only its owner can use, and the ones above it; one that is there stays as it is."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)


def make_private(folder: Path) -> None:
    """Make ``folder``, which only its owner can use; close one that is there to others, if this user owns it."""
    make_folder(folder)
    close_to_others(folder, 0o700)


def write_privately(root: Path, path: Path, data: bytes) -> None:
    """Write ``data`` to ``path``, as ``write_atomically`` does; only its owner can use it, its folder and ``root``."""
    for folder in (root, path.parent):
        make_folder(folder)
    write_atomically(path, data, mode=PRIVATE_FILE)


def make_private_file(file: Path) -> None:
    """Make an empty ``file`` that only its owner can use; close one that is there, if this user owns it."""
    with suppress(FileExistsError):
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, PRIVATE_FILE))
    close_to_others(file, PRIVATE_FILE)


def close_to_others(path: Path, mode: int) -> None:
    """Give ``path`` the permissions ``mode`` if others may use it and this user owns it; it need not be there."""
    with suppress(OSError):
        stat = path.stat()
        if stat.st_mode & OTHERS and stat.st_uid == os.geteuid():
            path.chmod(mode)
