"""Turns of gangs that prepare at the same time on the same GPUs and are timed one after the other.

They meet in a folder, once or in rounds. ``ready-N-R`` marks that the gang of turn N waits to be timed in round R,
``done-N-R`` that it was timed, and ``left-N`` that it has ended.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

MOST_WAITED_S = 600.0
"""Longer than any stage: a gang that is stopped with its stage has timed nothing beside others."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--meet`` (a path; None without it) and ``--turn``."""
    parser.add_argument("--meet", type=Path, help="folder through which processes that prepare at one time take turns")
    parser.add_argument("--turn", nargs=2, type=int, default=(1, 0), help="how many meet, and whose turn comes first")


@dataclass(kw_only=True, slots=True)
class Meeting:
    """One gang's place among ``size`` gangs in ``folder``.

    Every rank watches the folder, and the first one writes for its gang. A rank that waited in an exchange would keep
    its GPU busy and slow down the gang whose turn it is.
    """

    folder: Path
    size: int
    turn: int
    rank: int = 0
    round: int = 0

    def begin(self) -> None:
        """Wait until all gangs are ready, then for the turns before this one.

        TimeoutError if the others take too long: times beside gangs at work would be wrong.
        """
        self._say("ready")
        self._wait("ready", range(self.size), f"{self.size} gangs are ready")
        self._wait("done", range(self.turn), f"{self.turn} turns are over")

    def end(self) -> None:
        """Wait until all gangs are done: preparing the next round would disturb them. Failed gangs call it too."""
        self._say("ready")
        self._say("done")
        self._wait("done", range(self.size), f"{self.size} turns are over")
        self.round += 1

    def leave(self) -> None:
        """Mark that the gang has ended, so that no other waits for it."""
        if self.rank == 0 and self.folder.is_dir():
            (self.folder / f"left-{self.turn}").touch()

    def was_ready(self) -> bool:
        """Return whether this gang was ready once."""
        return self._has_said("ready", self.turn, round=0)

    def _say(self, state: str) -> None:
        if self.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"{state}-{self.turn}-{self.round}").touch()

    def _has_said(self, state: str, turn: int, *, round: int) -> bool:
        return (self.folder / f"{state}-{turn}-{round}").exists() or (self.folder / f"left-{turn}").exists()

    def _wait(self, state: str, turns: range, what: str) -> None:
        end_s = time.monotonic() + MOST_WAITED_S
        while not all(self._has_said(state, turn, round=self.round) for turn in turns):
            if time.monotonic() > end_s:
                raise TimeoutError(
                    f"waited {MOST_WAITED_S:g} s until {what}: nothing was timed; time fewer cases at once"
                )
            time.sleep(0.1)


def meeting_of(arguments: argparse.Namespace, rank: int) -> Meeting | None:
    """Return the meeting of ``rank``; None without ``--meet``."""
    if arguments.meet is None:
        return None
    size, turn = arguments.turn
    return Meeting(folder=arguments.meet, size=size, turn=turn, rank=rank)
