"""Turns on the GPUs of a host among its processes: many prepare side by side, and who times steps is alone.

Processes that share a GPU take turns on it. A step beside another's work takes longer, and one whose ranks exchange
tensors longer still, as each of them waits for the others' turns: steps of 66 and 75 ms took 104 and 114 on two H200s
where an encoder and a decoder were made ready at that time.
"""

from __future__ import annotations

import fcntl
import logging
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)


class HostTurns:
    """``folder`` is where processes find each other; hosts that share it have a file each there. Whose process ends has
    left. A folder that cannot be written keeps nobody from anything."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / f"{socket.gethostname()}.lock"

    @contextmanager
    def beside_others(self) -> Iterator[None]:
        """Waits until nobody is alone; inside the block nobody will be."""
        with self._locked(fcntl.LOCK_SH):
            yield

    def try_alone(self) -> AbstractContextManager[object] | None:
        """Returns what is to be left by who is alone until then; None where others are there."""
        try:
            return self._locked(fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None

    def _locked(self, operation: int) -> AbstractContextManager[object]:
        with ExitStack() as opened:
            try:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                file = opened.enter_context(self._file.open("a"))
                fcntl.flock(file, operation)
                opened.callback(fcntl.flock, file, fcntl.LOCK_UN)  # a child that was forked meanwhile has it open, too
            except BlockingIOError:
                raise
            except OSError as error:
                logger.warning("processes that share GPUs cannot take turns: %s", error)
            return opened.pop_all()
