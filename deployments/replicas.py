"""Set-up of every Serve replica's process."""

from __future__ import annotations

import ipaddress

import ray

from deployments.observability.logs import configure_logs
from deployments.ray_private import bind_replicas_to_loopback


def prepare_replica() -> None:
    """Send logs to stderr; on a loopback cluster, accept calls from this machine only."""
    configure_logs()
    if is_on_loopback():
        bind_replicas_to_loopback()


def is_on_loopback() -> bool:
    """Return whether the cluster is this machine only, on 127.0.0.1."""
    address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return ipaddress.ip_address(address).is_loopback
