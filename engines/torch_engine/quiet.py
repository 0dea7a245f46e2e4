"""A gang that times its steps while no other process of its hosts makes itself ready on their GPUs."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import torch
import torch.distributed as dist

from engines.core.storage.host_turns import HostTurns
from engines.torch_engine.agreement import gathered, is_everywhere

logger = logging.getLogger(__name__)

POLL_S = 0.1
PATIENCE_S = 180.0
"""For how long a decision waits in all: to compile an auto-encoder of clips anew takes a minute or two."""


class Quiet:
    """``turns`` are those of each rank's host; None: others work on. All ranks make the same calls."""

    def __init__(self, turns: HostTurns | None, device: torch.device) -> None:
        self._turns, self._device = turns, device
        self._polls_left = round(PATIENCE_S / POLL_S)
        self._speaks = turns is not None and _is_first_of_host()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """What is done inside is beside nobody's preparations, unless these last too long."""
        with ExitStack() as held:
            if self._turns is not None:
                self._take(self._turns, held)
            yield

    def _take(self, turns: HostTurns, held: ExitStack) -> None:
        while not self._has_taken(turns, held):
            if self._polls_left == 0:
                logger.warning("steps are timed beside other processes, which prepare for %.0f s already", PATIENCE_S)
                return
            self._polls_left -= 1
            time.sleep(POLL_S)

    def _has_taken(self, turns: HostTurns, held: ExitStack) -> bool:
        """On all hosts or on none: two gangs that are on both of two hosts would each wait for the other's."""
        mine = turns.try_alone() if self._speaks else nullcontext()
        is_there = is_everywhere(mine is not None, self._device)
        with ExitStack() as taken:
            if mine is not None:
                taken.enter_context(mine)
            if is_there:
                held.enter_context(taken.pop_all())
        return is_there


def _is_first_of_host() -> bool:
    host = socket.gethostname()
    return gathered(host).index(host) == dist.get_rank()
