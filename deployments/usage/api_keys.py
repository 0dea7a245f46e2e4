"""API keys: kept as hashes alone, and read again when their file changes."""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol, TypeVar

from deployments.places import read_text

logger = logging.getLogger("troupe.keys")

EVERYBODY = "*"
"""In place of the beginning of a key's hash: every key without an entry of its own, and no key."""
LOOK_EVERY_S = 1.0
"""Shortest time between two looks at the file."""


class KeyEntry(Protocol):
    """An entry of the configuration for API keys."""

    @property
    def key(self) -> str:
        """The beginning of a key's hash, or EVERYBODY."""
        ...


E = TypeVar("E", bound=KeyEntry)


class KeyRing:
    """The keys that a server accepts: ``keys``, and those in ``file``. An empty ring asks for none.

    While requests come, the file is read again after each change. If it is then unreadable or empty, the keys stay as
    they were, and the log says so. ValueError if it is so at the start, or for an empty key. ``clock`` gives seconds.
    """

    def __init__(
        self, keys: Iterable[str] = (), file: Path | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._fixed = frozenset(map(hash_of, keys))
        if hash_of("") in self._fixed:
            raise ValueError("there is an empty API key; remove it, or give no keys to ask for none")
        self._file, self._clock, self._looked_s = file, clock, -math.inf
        self._stamp = None if file is None else stamp_of(file)
        self._of_file = frozenset(map(hash_of, () if file is None else read_keys(file)))

    def __bool__(self) -> bool:
        return bool(self._fixed) or self._file is not None

    def find(self, key: str) -> str | None:
        """Return the hash of ``key``, which is the identity of its holder; None if the ring has no such key."""
        wanted = hash_of(key)
        return wanted if self.holds(wanted) else None

    def holds(self, key_hash: str) -> bool:
        """Return whether the ring has the key with that hash."""
        self._look()
        # All are compared, so that the time tells nothing.
        return sum(hmac.compare_digest(key_hash, one) for one in self._fixed | self._of_file) > 0

    def _look(self) -> None:
        if self._file is None or self._clock() - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = self._clock()
        stamp = stamp_of(self._file)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._of_file = frozenset(map(hash_of, read_keys(self._file)))
        except ValueError as error:
            logger.warning("the API keys stay as they were: %s", error)
        else:
            logger.info("the API keys were read again; the file holds %d", len(self._of_file))


def hash_of(key: str) -> str:
    """Return the SHA-256 of ``key`` in hexadecimal digits. Keys are random, so guessing finds none."""
    return hashlib.sha256(key.encode()).hexdigest()


def check_key_start(name: str, start: str) -> None:
    """Raise ValueError, with the ``name`` of the setting, unless ``start`` is of a key's hash, or EVERYBODY."""
    if start != EVERYBODY and not re.fullmatch(r"[0-9a-f]{8,64}", start):
        allowed = "8 to 64 digits at the beginning of the key's SHA-256 (printf %s KEY | sha256sum), or *"
        raise ValueError(f"{name} is {start!r}; it must be {allowed}")


def entry_of(entries: Iterable[E], key_hash: str) -> E | None:
    """Return the entry whose ``key`` ``key_hash`` begins with, or else that of EVERYBODY; None without either."""
    ordered = sorted(entries, key=lambda one: one.key == EVERYBODY)
    return next((one for one in ordered if one.key == EVERYBODY or key_hash.startswith(one.key)), None)


def read_keys(file: Path) -> tuple[str, ...]:
    """Return the keys in ``file``: one a line, # begins a comment line. ValueError if there is none."""
    try:
        lines = [line.strip() for line in read_text(file).splitlines()]
    except OSError as error:
        raise ValueError(f"the key file {file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"the key file {error}") from None
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ValueError(f"the key file {file} holds no key; write one a line")
    return keys


def stamp_of(file: Path) -> tuple[int, int, int] | None:
    """Return time of change, size and inode of ``file``; None if it is not there."""
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
