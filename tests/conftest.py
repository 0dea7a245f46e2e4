"""One small Ray cluster for all tests that want one: ask for the fixture ``ray_cluster``."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["RAY_AUTH_MODE"] = "disabled"  # read when Ray is imported
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

import pytest

NUM_CLUSTER_CPUS = 8
"""More than the machine may have: tests ask for fractions of a CPU, and are mostly waiting."""


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A cluster of this session alone, ended with it. Serve applications in it belong to their test modules."""
    import ray

    from deployments.serving import SERVE_ENVIRONMENT

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
