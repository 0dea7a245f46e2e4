"""Files that other processes may read while they are written."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_atomically(path: Path, data: bytes) -> None:
    """Writes ``data`` to ``path``, and makes its folders.

    Readers, and a machine that dies meanwhile, see the old file or the whole new one, never a part. Its permissions are
    those of any new file. It waits for the disk: inside an event loop, call it in a thread.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with partial.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
