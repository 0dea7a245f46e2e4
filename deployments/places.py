"""Private folders and files, and checks whether they can be written."""

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
    """Return why ``folder`` cannot be written or created; None if it can. Leave no trace."""
    nearest = next((each for each in (folder, *folder.absolute().parents) if os.path.exists(each)), Path("/"))
    try:
        with tempfile.TemporaryFile(dir=nearest):
            return None
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        problem = f"{nearest} cannot be written ({reason})"
        return problem if nearest == folder else f"{folder} cannot be made: {problem}"


def file_refusal(file: Path) -> str | None:
    """Return why ``file``, which need not exist, cannot be written; None if it can."""
    if not os.path.exists(file):
        return refusal(file.parent)
    return None if os.access(file, os.R_OK | os.W_OK) else f"{file} belongs to another user, or cannot be written"


def is_open_to_others(path: Path) -> bool:
    """Return whether other users have any permission for ``path``; False if it does not exist."""
    with suppress(OSError):
        return bool(path.stat().st_mode & OTHERS)
    return False


def make_folder(folder: Path) -> None:
    """Create a private ``folder`` and its parents; an existing one is not changed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)


def make_private(folder: Path) -> None:
    """Create a private ``folder``; make an existing one private if this user owns it."""
    make_folder(folder)
    close_to_others(folder, 0o700)


def write_privately(root: Path, path: Path, data: bytes) -> None:
    """Write ``data`` to a private file at ``path``, atomically; create its folder and ``root`` as private ones."""
    for folder in (root, path.parent):
        make_folder(folder)
    write_atomically(path, data, mode=PRIVATE_FILE)


def make_private_file(file: Path) -> None:
    """Create an empty private ``file``; make an existing one private if this user owns it."""
    with suppress(FileExistsError):
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, PRIVATE_FILE))
    close_to_others(file, PRIVATE_FILE)


def close_to_others(path: Path, mode: int) -> None:
    """Set the permissions of ``path`` to ``mode`` if others have any and this user owns it; it need not exist."""
    with suppress(OSError):
        stat = path.stat()
        if stat.st_mode & OTHERS and stat.st_uid == os.geteuid():
            path.chmod(mode)
