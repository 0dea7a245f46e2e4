"""All that is prepared on this machine before Ray starts, and taken back after its end."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import ray

from deployments.cli.local.folder import RAYS, own_folder
from deployments.cli.local.proxies import exceptions_for
from deployments.cli.local.token import token_variables
from deployments.places import make_folder
from deployments.settings import Settings, process_environment, variables_set


@contextmanager
def prepared() -> Iterator[Path]:
    """Yield the folder for Ray's files. Processes that start inside the block find a token, and use no proxy for each
    other."""
    variables = process_environment()
    with suppress(OSError):
        make_folder(Settings().data_dir)  # before a process that keeps times there makes one for all users
    with own_folder(variables) as folder:
        own = (ray.util.get_node_ip_address(), socket.gethostname())  # type: ignore[no-untyped-call]
        with variables_set({**token_variables(variables, folder), **exceptions_for(own, variables)}):
            yield folder / RAYS
