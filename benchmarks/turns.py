"""Gangs of several processes that prepare at the same time on the same GPUs, and are timed one after the other.

They meet in a folder: ``ready-N`` says that the gang of turn N waits to be timed, ``done-N`` that its times are taken.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

MOST_WAITED_S = 600.0
"""Longer than any stage lasts: who is stopped with its stage has timed nothing beside others."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds ``--meet`` (a path; None without it) and ``--turn``."""
    parser.add_argument("--meet", type=Path, help="folder through which processes that prepare at one time take turns")
    parser.add_argument("--turn", nargs=2, type=int, default=(1, 0), help="how many meet, and whose turn comes first")


def meet(folder: Path, size: int, turn: int, *, rank: int) -> None:
    """Wait until ``size`` gangs that compile at the same time are ready, then for the turns before this one.

    Every rank watches the folder by itself: one that waited in an exchange would keep its GPU busy, and slow down the
    gang whose turn it is. TimeoutError if the others take too long: times beside gangs at work would be wrong.
    """
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        _path(folder, "ready", turn).touch()
    _wait_until(lambda: len(list(folder.glob("ready-*"))) >= size, f"{size} gangs are ready")
    _wait_until(lambda: all(_path(folder, "done", before).exists() for before in range(turn)), f"{turn} turns are over")


def leave(folder: Path, turn: int) -> None:
    """Nobody waits for a gang that has ended, however it ended; nor for one whose times are taken."""
    if folder.is_dir():
        _path(folder, "ready", turn).touch()
        _path(folder, "done", turn).touch()


def is_ready(folder: Path, turn: int) -> bool:
    return _path(folder, "ready", turn).exists()


def _path(folder: Path, state: str, turn: int) -> Path:
    return folder / f"{state}-{turn}"


def _wait_until(is_so: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + MOST_WAITED_S
    while not is_so():
        if time.monotonic() > end_s:
            raise TimeoutError(f"waited {MOST_WAITED_S:g} s until {what}: nothing was timed; time fewer cases at once")
        time.sleep(0.1)
