"""A Ray cluster on this machine, for one application and as long as it runs."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import ray
from ray._private import worker
from ray._private.node import Node

from deployments.app import REPLICA_CPUS
from deployments.cli.ending import interrupts_later
from deployments.cli.local.prepared import prepared
from deployments.cli.local.sessions import own_sessions
from deployments.config import ServeConfig
from deployments.forked_workers import forking_cluster
from deployments.settings import set_defaults

SERVE_ENVIRONMENT: Mapping[str, str] = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "0.5",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "1.5",
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",
}
"""To be set where a cluster's nodes are started, since replicas inherit it from there.

One event loop per replica instead of two: nothing that is awaited here takes long, and each way between loops costs a
request time. A proxy that died or hangs is replaced after seconds: its door waits for it. A replica that answers no
health check is killed, since it may be stopped and hear of nothing. Replicas at rest wake up once a second, not ten
times, for metrics that Ray shows every ten seconds.
"""
LOCAL_ENVIRONMENT: Mapping[str, str] = {"SCAN_EVENT_DIR_INTERVAL_SECONDS": "3600"}
"""Read by Ray's agent, which looks every other second for events to tell a dashboard of."""
LOCAL_SYSTEM: Mapping[str, Any] = {"task_events_report_interval_ms": 0, "kill_worker_timeout_milliseconds": 500}
"""No process notes each call and sends its notes once a second: a dashboard alone shows them. A process that is stopped
is killed after half a second, not five."""
UNASKED_SERVERS = ("start_log_monitor", "start_monitor", "start_api_server")
"""How Ray's node starts who reads all logs ten times a second for the driver, which does not want them; who would order
machines; and the dashboard, of which it leaves reports about its usage without one."""

logger = logging.getLogger("troupe.serving")


@contextmanager
def local_cluster(config: ServeConfig) -> Iterator[None]:
    """Runs a cluster inside the block, without the lines of log that Ray and Serve write for each."""
    for name in ("ray.serve", "ray._private.worker"):
        logging.getLogger(name).setLevel(logging.WARNING)
    quiet = logging.getLogger("ray._private.authentication.authentication_token_setup")
    quiet.addFilter(lambda record: "is enabled" not in record.getMessage())
    set_defaults(SERVE_ENVIRONMENT)
    set_defaults(LOCAL_ENVIRONMENT)
    _log_what_ray_prints()
    with prepared() as temp_dir, ExitStack() as stack:
        if config.app.fork_workers:
            stack.enter_context(forking_cluster())
        stack.callback(ray.shutdown)
        with interrupts_later(), only_servers_that_are_asked(), own_sessions():
            ray.init(
                address="local",  # whatever RAY_ADDRESS says: `serve deploy` is for clusters that run already
                runtime_env=config.applications[0].runtime_env or None,
                num_cpus=num_logical_cpus(config),
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=True,
                logging_level=logging.WARNING,
                _system_config=dict(LOCAL_SYSTEM),
                _temp_dir=str(temp_dir),
            )
        yield


@contextmanager
def only_servers_that_are_asked() -> Iterator[None]:
    """Has a node that starts inside the block do without ``UNASKED_SERVERS``: seconds of CPU time at its start.

    Ray 2.60 has options for two of them, on its command line alone (``--include-log-monitor``, ``--no-monitor``).
    """
    before = {name: getattr(Node, name) for name in UNASKED_SERVERS}
    for name in UNASKED_SERVERS:
        setattr(Node, name, lambda node, **options: None)
    try:
        yield
    finally:
        for name, start in before.items():
            setattr(Node, name, start)


def _log_what_ray_prints() -> None:
    """Has the paragraphs that Ray prints of every process that died logged: here that is told in words of our own.

    Ray 2.60 prints them whatever ``log_to_driver`` says (``listen_error_messages``).
    """

    def log(data: Mapping[str, Any], ignore_prefix: bool) -> None:
        logger.debug("Ray says: %s", " ".join(map(str, data["lines"])))

    setattr(worker, "print_to_stdstream", log)  # noqa: B010


def num_logical_cpus(config: ServeConfig) -> int:
    """Returns the logical CPUs for a local cluster: the machine's, or what the config asks for if that is more."""
    num_cpus = config.app.api.num_replicas * config.app.api.num_cpus + 1.0
    for model in config.app.models:
        for stage in (model.text_encoder, model.decoder):
            num_cpus += stage.max_num_replicas * stage.num_cpus
        denoiser = model.denoiser
        num_cpus += denoiser.max_num_replicas * (REPLICA_CPUS + denoiser.num_ranks * denoiser.cpus_per_rank)
    return max(os.cpu_count() or 1, int(num_cpus) + 1)
