"""Share one small Ray cluster among tests (fixture ``ray_cluster``), and divide test files between two processes."""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["RAY_AUTH_MODE"] = "disabled"  # read when Ray is imported
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # else 15: other tests would leave them little of the cores
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")  # each time 0.1 s, in a process with all the tests

import psutil
import pytest

ROOT = Path(__file__).parents[1]
RAY_FILES = ROOT / "tests/ray.txt"
OF_RAY = frozenset(RAY_FILES.read_text().split())
DURATIONS = ROOT / "tests/durations.json"
"""Seconds by file (``make durations``)."""
SPREAD = ("tests/pipelines/test_gpu_jobs.py", "tests/pipelines/test_gpu_whole.py")
"""Files shared by all processes: a GPU mostly waits for its host."""
UNKNOWN_DURATION_S = 30.0
"""Assumed for a new file, which so comes early: a long one at the end would leave one process idle."""

RARE_SEARCHES = (20_000, 10, 10)
"""Python's thresholds for garbage collection: new objects, and collections of a generation. The default of the first is
700.
"""
NUM_CLUSTER_CPUS = 8
"""More than the machine may have: tests use fractions of a CPU, and mostly wait."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu-device",
        default="cuda:0",
        help="where tests of jobs on a GPU run; with cpu they show all but what is special about a GPU",
    )


@pytest.fixture
def gpu_device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Yield a gang's device, with matrix products and convolutions in true float32. Skip without it."""
    import torch

    name = str(request.config.getoption("--gpu-device"))
    if torch.device(name).type == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    backends: Any = (torch.backends.cudnn, torch.backends.cuda.matmul)
    allowed = [backend.allow_tf32 for backend in backends]
    for backend in backends:
        backend.allow_tf32 = False
    yield name
    for backend, value in zip(backends, allowed, strict=True):
        backend.allow_tf32 = value


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """Start a cluster for this session. Serve applications in it belong to their test modules."""
    import ray

    from deployments.cli.cluster import LOCAL_ENVIRONMENT, LOCAL_SYSTEM, SERVE_ENVIRONMENT
    from deployments.forked_workers import forking_cluster
    from deployments.ray_private import init_local, without_optional_servers

    with (
        tempfile.TemporaryDirectory(prefix="troupe_ray_", dir="/tmp", ignore_cleanup_errors=True) as temp_dir,
        pytest.MonkeyPatch.context() as patch,
        ExitStack() as stack,
    ):
        patch.setenv("TROUPE_DATA_DIR", f"{temp_dir}/data")  # workers inherit the present environment
        patch.setenv("RAY_gcs_server_port_wait_time_s", "120")  # its 30 are too few on a very busy machine
        for name, value in {**SERVE_ENVIRONMENT, **LOCAL_ENVIRONMENT}.items():
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


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give one process all files of ``tests/ray.txt``, since of two clusters that start at once one may fail. Every
    other file stays in one process too, except those of ``SPREAD``.

    Groups of xdist (``--dist loadgroup``) would do it, but pytest 9.2 ignores them (pytest-xdist issue 1386).
    """
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    class RayTogether(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = str(super()._split_scope(nodeid))
            return "ray" if file in OF_RAY else nodeid if file in SPREAD else file

    return RayTogether(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files for two processes.

    Ray comes first, in the order of its folders: a package's fixtures, such as a running application, end where another
    package begins. Next come tests on Gloo ranks, whose processes are started once and reused. The rest follows by
    duration, so that the last files are short.
    """
    for item in items:
        if is_of_ray(item) and file_of(item) not in OF_RAY:
            raise pytest.UsageError(f"{item.nodeid} uses a Ray cluster: add its file to {RAY_FILES.relative_to(ROOT)}")
    if "PYTEST_XDIST_WORKER" in os.environ:
        durations_s = json.loads(DURATIONS.read_text())
        items.sort(key=lambda item: place_of(item, durations_s))


def place_of(item: pytest.Item, durations_s: Mapping[str, float]) -> tuple[float, ...]:
    """Return the sort key of an item. All items of Ray are equal."""
    if file_of(item) in OF_RAY:
        return (0,)
    return (1, not is_of_gloo(item), -durations_s.get(file_of(item), UNKNOWN_DURATION_S))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Add the CPU seconds of each test to the JUnit report, if there is one (``make durations``)."""
    if call.when == "teardown" and "PYTEST_XDIST_WORKER" in os.environ and item.config.option.xmlpath:
        item.user_properties.append(("cpu_s", CPU.since_last_s()))


class CPUSeconds:
    """CPU seconds of this process and its descendants, if they are alive or it waited for their end."""

    def __init__(self) -> None:
        self._process, self._last_s = psutil.Process(), 0.0

    def since_last_s(self) -> float:
        """Return the seconds since the last call, without those of processes that have just ended elsewhere."""
        now_s = sum(map(self._of, [self._process, *self._process.children(recursive=True)]))
        spent_s, self._last_s = max(0.0, now_s - self._last_s), now_s
        return round(spent_s, 2)

    def _of(self, process: psutil.Process) -> float:
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            return float(times.user + times.system + times.children_user + times.children_system)
        return 0.0


CPU = CPUSeconds()


def file_of(item: pytest.Item) -> str:
    return item.location[0]


def is_of_ray(item: pytest.Item) -> bool:
    """Return True for a test that runs in the session's cluster, or starts its own (the marker ``ray``)."""
    return "ray_cluster" in getattr(item, "fixturenames", ()) or item.get_closest_marker("ray") is not None


def is_of_gloo(item: pytest.Item) -> bool:
    """Return True for the tests of a module that imports ``tests.engines.support.gloo.gang``."""
    gloo = sys.modules.get("tests.engines.support.gloo")
    return gloo is not None and getattr(getattr(item, "module", None), "gang", None) is gloo.gang


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect without garbage collection, which would be a third of the time, and freeze all objects afterwards.

    No collection walks over these objects again, most of a million. Later collections are rare. Python's thresholds
    would take an eighth of the tests' time, and a quarter of tracing and exporting a model.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(*RARE_SEARCHES)
        gc.enable()


def pytest_collection_finish() -> None:
    """Compute on one thread in each of two processes: threads of both would wait for each other."""
    if "PYTEST_XDIST_WORKER" in os.environ and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
