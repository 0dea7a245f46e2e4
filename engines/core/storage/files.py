"""Files that other processes may read while they are written."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path


def write_atomically(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Writes ``data`` to ``path``, and makes its folders.

    Readers, and a machine that dies meanwhile, see the old file or the whole new one, never a part. Its permissions are
    ``mode`` less the process's umask, as of any new file. It waits for the disk: inside an event loop, call it in a
    thread.
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
    """Writes ``data`` to ``path`` as ``write_atomically`` does, if there is no such file. Returns whether it did: of
    several processes that try at the same moment, one does."""
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
    """Gives a file its other name. FileExistsError if that is taken.

    Where files have one name only (many network file systems), whoever reads at that very moment may find it empty.
    """
    try:
        os.link(whole, path)
    except FileExistsError:
        raise
    except OSError:
        path.touch(exist_ok=False)
        whole.replace(path)


def file_about(folder: Path, name: str, facts: Mapping[str, object]) -> Path:
    """Returns the JSON file in ``folder`` for what holds for ``facts`` alone: its name begins with ``name`` and has a
    digest of them, as JSON writes them."""
    digest = hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode()).hexdigest()[:16]
    return folder / f"{name}_{digest}.json"
