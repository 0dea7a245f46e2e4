"""The private names of Ray that this project touches, one function each, with a test each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ray._private import ray_constants


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
