"""Ray's processes in sessions of their own, so that a signal to a group of processes reaches the server alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray._private import services


@contextmanager
def own_sessions() -> Iterator[None]:
    """Start each of Ray's processes inside the block, and so all that these start, as the leader of a session.

    Ctrl-C in a terminal, ``timeout`` and supervisors signal a whole group of processes. The server ends its cluster in
    order; one that is gone by then makes it wait for a minute. Ray 2.60 has no option for that. Elsewhere than on Linux
    nothing changes: there Ray ends its processes by their group when the server is killed.
    """
    if not sys.platform.startswith("linux"):
        yield
        return
    before: Any = services.ConsolePopen

    class InOwnSession(subprocess.Popen[Any]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, start_new_session=True, **kwargs)

    setattr(services, "ConsolePopen", InOwnSession)  # noqa: B010
    try:
        yield
    finally:
        setattr(services, "ConsolePopen", before)  # noqa: B010
