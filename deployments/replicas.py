"""What the process of every Serve replica does before anything else."""

from __future__ import annotations

import ipaddress

import ray
from ray.serve._private import replica

from deployments.observability.logs import configure_logs


def prepare_replica() -> None:
    """Sends logs to stderr; where the node is this machine alone, lets nobody in from outside."""
    configure_logs()
    if is_on_loopback():
        listen_on_loopback()


def is_on_loopback() -> bool:
    """Returns whether the cluster is this machine alone, and listens on 127.0.0.1."""
    address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return ipaddress.ip_address(address).is_loopback


def listen_on_loopback() -> None:
    """Binds the port that replicas call each other on to 127.0.0.1.

    Ray 2.60 opens it on all interfaces and unpickles what comes, whoever sends it (``Replica._on_initialized``), and
    has no setting for that. It runs after the constructor of the deployment.
    """
    name = "add_port_to_grpc_server"
    bind = getattr(replica, name)

    def bind_on_loopback(server: object, address: str) -> int:
        port: int = bind(server, address.replace("[::]", "127.0.0.1"))
        return port

    setattr(replica, name, bind_on_loopback)
