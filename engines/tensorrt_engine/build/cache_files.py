"""Cache files of the builder: made once for all processes, and made again if damaged."""

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
_DAMAGE_ERRORS = (ValueError, KeyError, TypeError, FileNotFoundError, zipfile.BadZipFile)


def get_or_make(path: Path, read: Callable[[Path], T], make: Callable[[], T]) -> T:
    """Return ``read(path)``, or ``make()``, which must write the file.

    One of several concurrent processes makes it; the others wait. A file is damaged if ``read`` raises ValueError,
    KeyError, TypeError, FileNotFoundError or BadZipFile. A damaged file is logged and made again.
    """
    with locked(path):
        stored = _read_stored(path, read)
        return make() if stored is None else stored


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file beside ``path``; make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        yield


def _read_stored(path: Path, read: Callable[[Path], T]) -> T | None:
    if not path.exists():
        return None
    try:
        return read(path)
    except _DAMAGE_ERRORS as error:
        logger.warning("%s is damaged (%s) and will be made again", path, error)
        return None
