"""Private names of Ray, one function each. Those of other files are still to come here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants
from ray.serve.context import _get_global_client


@contextmanager
def workers_set_up_by(script: Path) -> Iterator[None]:
    """Have a node that starts inside the block set up its Python workers by ``script``.

    Ray 2.60 joins the name of its own script to a folder, which an absolute path replaces (``Node.__init__``). Its own
    imports all of Ray in each worker before the worker itself does.
    """
    own = ray_constants.SETUP_WORKER_FILENAME
    ray_constants.SETUP_WORKER_FILENAME = str(script)
    try:
        yield
    finally:
        ray_constants.SETUP_WORKER_FILENAME = own


def controller_answers(within_s: float) -> bool:
    """Return whether Serve's controller answers a call in time. False where there is no Serve."""
    controller = _controller()
    if controller is None:
        return False
    ready, _ = ray.wait([controller.check_alive.remote()], timeout=within_s)
    return bool(ready)


def restart_controller() -> None:
    """Kill the process of Serve's controller. Ray starts another, which goes on from what the first one has kept."""
    controller = _controller()
    if controller is not None:
        ray.kill(controller, no_restart=False)


def _controller() -> Any:
    client: Any = _get_global_client(raise_if_no_controller_running=False)
    return None if client is None else client._controller
