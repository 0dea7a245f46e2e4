"""Files that are made once for all processes that want them."""

from __future__ import annotations

import logging
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from filelock import FileLock

logger = logging.getLogger("troupe.tensorrt")

T = TypeVar("T")
_DAMAGES = (ValueError, KeyError, TypeError, FileNotFoundError, zipfile.BadZipFile)


def get_or_make(path: Path, read: Callable[[Path], T], make: Callable[[], T]) -> T:
    """Returns what ``read`` makes of the file, or what ``make`` returns, which has to write the file.

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
