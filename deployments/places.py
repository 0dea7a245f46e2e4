"""Private folders and files, and checks whether they can be written."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TextIO

from engines.core.storage import write_atomically

PRIVATE_FILE = 0o600
OTHERS = 0o077
"""Permissions of all users but the owner."""
LOCK = "lock"
"""File of an ``OwnedFolder``, locked while its owner lives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnedFolder:
    """A private temporary folder, owned by this process until it deletes, releases or forgets the object, or ends."""

    path: Path
    """Folder of mode 700, with a file for the lock."""
    _lock: TextIO
    """Open file in it, locked while the folder is owned."""

    @classmethod
    def make(cls, base: Path, prefix: str) -> Self:
        """Create a folder in ``base`` whose name begins with ``prefix``; delete those of such names without an owner.

        Folders of other users, and those without a lock file, stay.
        """
        _sweep(base, prefix)
        while True:
            path = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
            lock = (path / LOCK).open("w")
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.fstat(lock.fileno()).st_nlink:
                return cls(path=path, _lock=lock)
            lock.close()  # another process swept the folder before it was locked

    def delete(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()

    def release(self) -> None:
        """Leave the folder to the next ``make``, which deletes it."""
        self._lock.close()


def _sweep(base: Path, prefix: str) -> None:
    """Delete this user's folders whose owners failed or were killed."""
    for folder in base.glob(f"{prefix}*"):
        try:
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            with (folder / LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # in use, already deleted, or another program's
            continue


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
    if file.is_dir():
        return f"{file} is a folder"
    return None if os.access(file, os.R_OK | os.W_OK) else f"{file} belongs to another user, or cannot be written"


def read_text(file: Path) -> str:
    """Return the text of ``file``, without the byte order mark of editors on Windows. ValueError unless it is UTF-8."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeError:
        raise ValueError(f"{file} is not text in UTF-8") from None


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
