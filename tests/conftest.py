"""One small Ray cluster for all tests that want one (ask for the fixture ``ray_cluster``), and which tests stay
together when they run in two processes."""

from __future__ import annotations

import gc
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["RAY_AUTH_MODE"] = "disabled"  # read when Ray is imported
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # else 15, hardly before tests of LOWEST_PRIORITY

import pytest

ROOT = Path(__file__).parents[1]
OF_RAY = re.compile(r"\bray_cluster: None\b|\bmark\.ray\b")
OF_GANGS = re.compile(r"\bgloo import gang\b")
LOWEST_PRIORITY = 19
FIRST = pytest.StashKey[pytest.Item]()

NUM_CLUSTER_CPUS = 8
"""More than the machine may have: tests ask for fractions of a CPU, and are mostly waiting."""


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A cluster of this session alone, ended with it. Serve applications in it belong to their test modules."""
    import ray

    from deployments.cli.cluster import LOCAL_ENVIRONMENT, LOCAL_SYSTEM, SERVE_ENVIRONMENT
    from deployments.forked_workers import forking_cluster
    from deployments.ray_private import init_local, without_optional_servers

    with (
        tempfile.TemporaryDirectory(prefix="troupe_ray_", dir="/tmp", ignore_cleanup_errors=True) as temp_dir,
        pytest.MonkeyPatch.context() as patch,
        ExitStack() as stack,
    ):
        patch.setenv("TROUPE_DATA_DIR", f"{temp_dir}/data")  # workers inherit the environment of this moment
        for name, value in (SERVE_ENVIRONMENT | LOCAL_ENVIRONMENT).items():
            patch.setenv(name, value)
        stack.enter_context(forking_cluster())
        with without_optional_servers():
            init_local(
                Path(temp_dir),
                LOCAL_SYSTEM,
                num_cpus=NUM_CLUSTER_CPUS,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.WARNING,
                configure_logging=True,
                object_store_memory=200 * 2**20,
            )
        try:
            yield
        finally:
            ray.shutdown()


@cache
def is_of_ray(file: str) -> bool:
    """Whether tests of a file run in the session's cluster, or start one of their own (the marker ``ray``).

    Read from its text and that of the ``conftest.py`` beside it: who hands out tests knows their files alone.
    """
    texts = (each.read_text() for each in (ROOT / file, (ROOT / file).with_name("conftest.py")) if each.exists())
    return any(OF_RAY.search(text) for text in texts)


@cache
def turn_of(file: str) -> int:
    """When the tests of a file begin: those of Ray first, then those of gangs of Gloo ranks, then all others."""
    is_of_gangs = OF_GANGS.search((ROOT / file).read_text()) is not None
    return 0 if is_of_ray(file) else 1 if is_of_gangs else 2


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``-n`` one process has all tests of Ray, as of two clusters that start at once one may give up. Of others
    those of a file stay together."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = str(super()._split_scope(nodeid))
            return "ray" if is_of_ray(file) else file

    return Scheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With ``-n`` the tests of Ray, which take longest, come first; what is left at the end is shared out. Before that
    come the tests of Gloo ranks: the other process keeps its gangs for all of them, and this one need not make its own.
    """
    for item in items:
        if "ray_cluster" in getattr(item, "fixturenames", ()) and not is_of_ray(item.location[0]):
            raise pytest.UsageError(f"{item.nodeid} wants ray_cluster: say so in its file, or mark it with ray")
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: turn_of(item.location[0]))


def pytest_collection_finish() -> None:
    """What was imported and collected stays, most of a million objects: no search for garbage goes over it again,
    which would be a quarter of what tracing and exporting a model takes."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """With ``-n`` the process with the tests of Ray has the cores first: the other takes what it leaves. When both have
    tests of models, each has one core: threads of two processes would wait for each other."""
    first = item.session.stash.setdefault(FIRST, item)
    if "PYTEST_XDIST_WORKER" in os.environ and not is_of_ray(item.location[0]):
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)
        if first is item:
            os.nice(LOWEST_PRIORITY)
