"""A check whether a host's GPUs are locked."""

from __future__ import annotations

from engines.core.storage import HostLock


def is_free(lock: HostLock) -> bool:
    held = lock.try_exclusive()
    if held is None:
        return False
    with held:
        return True
