"""Files that several processes write, read and lock, and the kind of device that they are about."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import platform
import secrets
import socket
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from filelock import FileLock

logger = logging.getLogger(__name__)


def write_atomically(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Write ``data`` to ``path``, and make its folders.

    Readers see the old file or the whole new one, even after a crash. Permissions are ``mode`` less the process's
    umask. The call waits for the disk: inside an event loop, run it in a thread.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(partial, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_once(path: Path, data: bytes) -> bool:
    """Write ``data`` to ``path`` as ``write_atomically`` does, if there is no such file. Return whether it was written:
    one of several concurrent processes succeeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    write_atomically(whole, data)
    try:
        _claim(path, whole)
    except FileExistsError:
        return False
    finally:
        whole.unlink(missing_ok=True)
    return True


def _claim(path: Path, whole: Path) -> None:
    """Give the file ``whole`` the name ``path``. FileExistsError if that exists.

    On file systems without hard links (many network ones), a concurrent reader may find it empty.
    """
    try:
        os.link(whole, path)
    except FileExistsError:
        raise
    except OSError:
        path.touch(exist_ok=False)
        whole.replace(path)


def file_about(folder: Path, name: str, facts: Mapping[str, object]) -> Path:
    """Return the JSON file in ``folder`` for these ``facts``: ``name`` and a digest of the facts as JSON."""
    digest = hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode()).hexdigest()[:16]
    return folder / f"{name}_{digest}.json"


class HostLock:
    """A lock on the GPUs of a host: warm-ups share it, and a process that times steps holds it exclusively.

    Processes that share a GPU slow each other down, and with them the ranks that exchange tensors. Two H200s took 104
    and 114 ms for steps of 66 and 75 ms while an encoder and a decoder warmed up there.
    """

    def __init__(self, folder: Path) -> None:
        """Lock a file in ``folder``, one per host. If it cannot be opened, the lock has no effect."""
        self._file = folder / f"{socket.gethostname()}.lock"

    def shared(self) -> AbstractContextManager[object]:
        """Wait until no process holds the lock exclusively; return a context manager that releases it."""
        return self._lock(fcntl.LOCK_SH)

    def try_exclusive(self) -> AbstractContextManager[object] | None:
        """Return a context manager that releases the lock; None if another process holds it."""
        try:
            return self._lock(fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None

    def _lock(self, operation: int) -> AbstractContextManager[object]:
        with ExitStack() as opened:
            try:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                file = opened.enter_context(self._file.open("a"))
                fcntl.flock(file, operation)
                opened.callback(fcntl.flock, file, fcntl.LOCK_UN)  # a child forked meanwhile holds the file open, too
            except BlockingIOError:
                raise
            except OSError as error:
                logger.warning("the GPUs of this host cannot be locked: %s", error)
            return opened.pop_all()


def device_name(device: str) -> str:
    """Return the kind of a torch device; work takes equally long on devices of one kind."""
    import torch

    if device == "cpu":
        return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    return torch.cuda.get_device_name(device)


T = TypeVar("T")
_DAMAGES = (ValueError, KeyError, TypeError, FileNotFoundError, zipfile.BadZipFile)


def get_or_make(path: Path, read: Callable[[Path], T], make: Callable[[], T]) -> T:
    """Return what ``read`` makes of the file, or what ``make`` returns, which has to write the file.

    Of several processes that ask at once one makes it, the others wait. A file of which ``read`` raises ValueError,
    KeyError, TypeError, FileNotFoundError or BadZipFile is damaged: that is logged, and it is made again.
    """
    with locked(path):
        stored = _stored(path, read)
        return make() if stored is None else stored


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock beside ``path``, whose folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        yield


def _stored(path: Path, read: Callable[[Path], T]) -> T | None:
    if not path.exists():
        return None
    try:
        return read(path)
    except _DAMAGES as error:
        logger.warning("%s is damaged (%s) and will be made again", path, error)
        return None
