"""A Ray cluster on this machine for the lifetime of one application."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import ray

from deployments.app import REPLICA_CPUS
from deployments.cli.errors import interrupts_later
from deployments.cli.local import RAYS, exceptions_for, own_folder, token_variables
from deployments.config import ServeConfig
from deployments.forked_workers import forking_cluster
from deployments.places import make_folder
from deployments.ray_private import init_local, processes_in_own_sessions, quiet_logs, without_optional_servers
from deployments.settings import Settings, process_environment, set_defaults, variables_set

CALLERS: Mapping[str, Any] = {
    "grpc_client_check_connection_status_interval_milliseconds": 100,
    "core_worker_rpc_server_reconnect_timeout_base_s": 0,
}
"""Ray's settings by which a caller that died is noticed at once, not after two to three seconds.

Until then it blocks the replica whose stream to it has ended, which answers no health check.
"""
SERVE_ENVIRONMENT: Mapping[str, str] = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "0.5",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "1.5",
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",
    **{f"RAY_{name}": str(value) for name, value in CALLERS.items()},
}
"""Variables for the start of a cluster's nodes, from which replicas inherit them.

One event loop per replica instead of two: no coroutine blocks for long, and each hop between loops adds latency. A
proxy that died or hangs is replaced after seconds, while the door waits. A replica that answers no health check is
killed, since it may be stopped. Idle replicas wake up once a second, not ten times, for metrics.
"""
LOCAL_ENVIRONMENT: Mapping[str, str] = {"SCAN_EVENT_DIR_INTERVAL_SECONDS": "3600"}
"""Ray's agent scans for dashboard events, by default every two seconds."""
LOCAL_SYSTEM: Mapping[str, Any] = {
    "task_events_report_interval_ms": 0,
    "kill_worker_timeout_milliseconds": 500,
    **CALLERS,  # for this process too, which has read its environment before
}
"""No task events, which only a dashboard shows. A stopped process is killed after half a second, not five."""
SERVERS = ("gcs_server", "raylet")
"""Names of Ray's own processes, in the order of their start; the raylet starts all others."""
SHUTDOWN_WITHIN_S = 10.0

logger = logging.getLogger("troupe.serving")


@contextmanager
def local_cluster(config: ServeConfig) -> Iterator[None]:
    """Run a cluster inside the block, with few log lines of Ray and Serve."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    quiet_logs(lambda text: logger.debug("Ray says: %s", text))
    set_defaults(SERVE_ENVIRONMENT)
    set_defaults(LOCAL_ENVIRONMENT)
    with prepared() as temp_dir, ExitStack() as stack:
        if config.app.fork_workers:
            stack.enter_context(forking_cluster())
        stack.callback(shut_down)
        with interrupts_later(), without_optional_servers(), processes_in_own_sessions():
            init_local(  # `serve deploy` is for running clusters
                temp_dir,
                LOCAL_SYSTEM,
                runtime_env=config.applications[0].runtime_env or None,
                num_cpus=num_logical_cpus(config),
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=True,
                logging_level=logging.WARNING,
            )
        yield


def shut_down() -> None:
    """End the cluster. Kill its servers if one of them does not answer: Ray waits for ever for a stopped raylet."""
    ending = Limited(ray.shutdown)
    if ending.ends_within(SHUTDOWN_WITHIN_S):
        return
    logger.warning("Ray does not end and is killed", extra={"waited_s": SHUTDOWN_WITHIN_S})
    servers = [process for process in psutil.Process().children() if process.name() in SERVERS]
    # The raylet comes last: Ray ends this process with it.
    for process in (*(one for server in servers for one in server.children(recursive=True)), *servers):
        with suppress(psutil.Error):
            process.kill()
    ending.ends_within(SHUTDOWN_WITHIN_S)


class Limited:
    """Blocking ``work`` in a thread, which may never end. A thread has no event loop, unlike a notebook."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def ends_within(self, seconds: float) -> bool:
        """Wait for the end of ``work``, no longer than ``seconds``. Return whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()


def num_logical_cpus(config: ServeConfig) -> int:
    """Return the logical CPUs of a local cluster: the machine's, or the config's sum if that is larger."""
    num_cpus = config.app.api.max_num_replicas * config.app.api.num_cpus + 1.0
    for model in config.app.models:
        for stage in (model.text_encoder, model.decoder):
            num_cpus += stage.max_num_replicas * stage.num_cpus
        denoiser = model.denoiser
        num_cpus += denoiser.max_num_replicas * (REPLICA_CPUS + denoiser.num_ranks * denoiser.cpus_per_rank)
    return max(os.cpu_count() or 1, int(num_cpus) + 1)


@contextmanager
def prepared() -> Iterator[Path]:
    """Yield the folder for Ray's files, inside which processes have a token and use no proxy for each other."""
    variables = process_environment()
    with suppress(OSError):
        make_folder(Settings().data_dir)  # before another process creates it with wider permissions
    with own_folder(variables) as folder:
        own = (ray.util.get_node_ip_address(), socket.gethostname())  # type: ignore[no-untyped-call]
        with variables_set({**token_variables(variables, folder), **exceptions_for(own, variables)}):
            yield folder / RAYS
