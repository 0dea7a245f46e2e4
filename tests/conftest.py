"""One small Ray cluster for all tests that want one (ask for the fixture ``ray_cluster``), and who runs what when tests
run in two processes."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["RAY_AUTH_MODE"] = "disabled"  # read when Ray is imported
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

import pytest

# What one process of several (``-n``) runs, and no other: tests of Ray, since of two clusters that start at once one
# may give up, and tests in which something must happen soon. It begins with them, and the others leave it the cores.
TIMED = (
    "tests/deployments/api/",
    "tests/end_to_end/",
    "tests/deployments/cli/test_interrupt.py",
    "tests/deployments/cli/test_with_server.py",
    "tests/deployments/clips/",
    "tests/deployments/observability/",
    "tests/deployments/stages/test_full_queue.py",
    "tests/deployments/stages/test_stages.py",
    "tests/documents/",
    "tests/engines/gang/",
    "tests/engines/tensorrt_engine/test_faulty_rank.py",
)
LONGEST_FIRST = (*TIMED, "tests/engines/tensorrt_engine/", "tests/engines/", "tests/deployments/cli/", "")
LOWEST_PRIORITY = 19
HAS_BEGUN = pytest.StashKey[bool]()

NUM_CLUSTER_CPUS = 8
"""More than the machine may have: tests ask for fractions of a CPU, and are mostly waiting."""


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A cluster of this session alone, ended with it. Serve applications in it belong to their test modules."""
    import ray

    from deployments.cli.serving import SERVE_ENVIRONMENT

    with (
        tempfile.TemporaryDirectory(prefix="troupe_ray_", dir="/tmp", ignore_cleanup_errors=True) as temp_dir,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TROUPE_DATA_DIR", f"{temp_dir}/data")  # workers inherit the environment of this moment
        for name, value in SERVE_ENVIRONMENT.items():
            patch.setenv(name, value)
        ray.init(
            address="local",
            num_cpus=NUM_CLUSTER_CPUS,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
            configure_logging=True,
            object_store_memory=200 * 2**20,
            _system_config={"metrics_report_interval_ms": 1000},
            _temp_dir=temp_dir,
        )
        try:
            yield
        finally:
            ray.shutdown()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``-n``: the tests of a file stay together, and all timed ones."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "timed" if nodeid.startswith(TIMED) else str(super()._split_scope(nodeid))

    return Scheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With ``-n``, timed tests come first, and the last ones are short, so that no process waits long for another."""
    for item in items:
        if "ray_cluster" in getattr(item, "fixturenames", ()) and not item.nodeid.startswith(TIMED):
            raise pytest.UsageError(
                f"{item.nodeid} wants ray_cluster: its file should be in TIMED of tests/conftest.py"
            )
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: next(i for i, start in enumerate(LONGEST_FIRST) if item.nodeid.startswith(start)))


def stand_back() -> None:
    """From here on this process and its children get the time in which no other wants a core (on Linux)."""
    if sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(LOWEST_PRIORITY)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """With ``-n``, a process whose first test is not a timed one takes what the other leaves of the cores."""
    if "PYTEST_XDIST_WORKER" in os.environ and HAS_BEGUN not in item.session.stash:
        item.session.stash[HAS_BEGUN] = True
        if not item.nodeid.startswith(TIMED):
            import torch

            stand_back()
            torch.set_num_threads(1)
