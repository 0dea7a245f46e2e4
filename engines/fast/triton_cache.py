"""Entries of Triton's cache on disk that a process uses: recorded for other nodes, and restored from theirs.

Triton keeps a folder for each key. One holds a compiled kernel, or a C library that launches kernels. A key is a digest
of the kernel's source, its options, the GPU and Triton itself, so an entry of another node is the same. Files named
``__grp__*`` list paths of the entry's other files on the node that wrote them.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

GROUP = "__grp__"
"""Begin of the names of files that list the files of an entry."""
PATHS = "child_paths"
"""Key of the list in such a file: paths by file name."""

Entries = Mapping[str, Mapping[str, bytes]]
"""Content of files, by key of the entry and name of the file."""


def has_triton() -> bool:
    """Return whether Triton is installed."""
    return find_spec("triton") is not None


@contextmanager
def recorded_entries(known: Entries) -> Iterator[set[Path]]:
    """Yield the folders of all entries that this process looks up inside the block.

    An entry of ``known`` is restored when it is looked up and is missing on this node. If that fails, Triton compiles
    it, after a warning. A cache manager that the user has set (``TRITON_CACHE_MANAGER``) stays, and nothing is recorded
    or restored.
    """
    from triton import knobs
    from triton.runtime.cache import FileCacheManager

    found: set[Path] = set()
    if knobs.cache.manager_class is not None:
        yield found
        return
    knobs.cache.manager_class = _manager(FileCacheManager, known, found)
    try:
        yield found
    finally:
        knobs.cache.manager_class = None


def _manager(base: type[Any], known: Entries, found: set[Path]) -> type[Any]:
    """Return a subclass of Triton's manager of files, of which Triton makes an object for each key it looks up."""
    from triton import knobs

    class RecordingManager(base):  # type: ignore[misc]
        def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
            if not (override or dump):  # else it is a folder for debugging
                folder = Path(knobs.cache.dir) / key  # Inductor changes the folder of the cache
                if key in known:
                    _try_to_restore(folder, known[key])
                found.add(folder)
            super().__init__(key, override=override, dump=dump)

    return RecordingManager


def _try_to_restore(folder: Path, files: Mapping[str, bytes]) -> None:
    try:
        restore_entry(folder, files)
    except Exception as error:  # a full disk, or an entry that is not as Triton writes it
        logger.warning("an entry of Triton's cache cannot be restored: %s", error, extra={"entry": folder.name})


def read_entry(folder: Path) -> dict[str, bytes]:
    """Return the files of an entry by name, without those that a process is writing. Empty if there are none."""
    if not folder.is_dir():
        return {}
    files = (file for file in sorted(folder.iterdir()) if file.is_file() and file.name != "lock")
    return {file.name: file.read_bytes() for file in files}


def restore_entry(folder: Path, files: Mapping[str, bytes]) -> bool:
    """Write the ``files`` of another node's entry to ``folder``, all at once. Return False if it is not empty.

    Lists of paths then name the files in ``folder``. One of several concurrent processes succeeds. An entry that
    another process compiles now is left to it.
    """
    if folder.is_dir() and any(folder.iterdir()):
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        for name, data in files.items():
            (temporary / name).write_bytes(_with_paths(data, folder) if name.startswith(GROUP) else data)
        temporary.chmod(0o755)  # as Triton makes folders
        os.rename(temporary, folder)  # which may exist if it is empty
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return True


def _with_paths(data: bytes, folder: Path) -> bytes:
    group = json.loads(data)
    names = {name: Path(path).name for name, path in group[PATHS].items()}
    return json.dumps({**group, PATHS: {name: str(folder / file) for name, file in names.items()}}).encode()
