"""Queries of running processes, and listings of their files, which tolerate that both may go."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil


def cmdline(process: psutil.Process) -> list[str]:
    """Return the words of its command line; none for a process that has ended, or is about to."""
    words: list[str] = of_living(process.cmdline, [])
    return words


def of_living(ask: Callable[[], Any], otherwise: Any) -> Any:
    """Return the answer of ``ask``, a psutil call; ``otherwise`` if its process has ended, or is about to."""
    try:
        return ask()
    except psutil.Error:
        return otherwise


def paths_in(folder: Path) -> Iterator[Path]:
    """Yield all files and folders below ``folder``. Any may be gone by now; ``Path.rglob`` fails if a folder goes."""
    for root, folders, files in os.walk(folder):
        yield from (Path(root, name) for name in (*folders, *files))
