"""A look at who is there on a host."""

from __future__ import annotations

from engines.core.storage.host_turns import HostTurns


def could_be_alone(turns: HostTurns) -> bool:
    lock = turns.try_alone()
    if lock is None:
        return False
    with lock:
        return True
