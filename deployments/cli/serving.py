"""Start and stop the whole application from one process."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import ray
import yaml
from pydantic import ValidationError
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus, ServeDeploySchema

from deployments.app import build_app
from deployments.cli.client import PASSING
from deployments.cli.cluster import SHUTDOWN_WITHIN_S, Limited, local_cluster
from deployments.cli.local import http_client
from deployments.cli.preflight import check, with_metrics_port
from deployments.cli.worker_logs import memory_failures
from deployments.config import CONFIGS, AppConfig, ServeConfig
from deployments.config_errors import describe_errors, describe_truth_values
from deployments.door.door import Door, listen
from deployments.door.haproxy import PictureQueue, find_binary
from deployments.heartbeat import ANSWER_WITHIN_S, Heartbeat
from deployments.names import APPLICATION, INGRESS, url_at
from deployments.places import read_text
from deployments.ray_private import application_status, controller_answers, log_folder, restart_controller
from deployments.stages.measured_times import WHOLE_START, start_times_of

READY_DEADLINE_S = 900.0
"""Time until the application is ready, unless its gangs may take longer to start."""
START_MARGIN_S = 300.0
"""Time before and after the slowest gang's start."""
DRAIN_MARGIN_S = 15.0
"""Time for the last answers of a drained application."""
STORED_BYTES, STORED_WITHIN_S = 1 << 20, 10.0
"""An object that is not kept in its process, and the time to store it."""
DELETE_WITHIN_S = 60.0
"""Time for replicas to release their engines; the rest is killed with the cluster."""
SERVE_POLL_S = 1.0
"""Interval of checks for a failed deployment; each takes Serve's controller some 10 ms of CPU time."""
HEALTH_POLL_S = 0.5
"""Interval of ``GET /health``, each some 20 ms of CPU time; the application itself checks once a second."""
LOOPBACK, ANY_NETWORK = "127.0.0.1", ("0.0.0.0/0", "::/0")

logger = logging.getLogger("troupe.serving")


def load_config(name: str | Path) -> ServeConfig:
    """Read a config file, or a shipped config by its name ("laptop"). ValueError lists the shipped ones."""
    path = Path(name)
    if not path.is_file():
        path = CONFIGS / f"{name}.yaml"
    if not path.is_file():
        raise ValueError(f"{name} is neither a file nor a shipped config; shipped: {shipped_configs()}")
    try:
        return parse_config(yaml.safe_load(read_text(path)))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error


def shipped_configs() -> str:
    return ", ".join(sorted(file.stem for file in CONFIGS.glob("*.yaml")))


def parse_config(document: Mapping[str, Any]) -> ServeConfig:
    """Validate by Troupe's and by Ray Serve's schema, since ``serve deploy`` reads the same file.

    ValueError has a line for each mistake.
    """
    try:
        config = ServeConfig.model_validate(document)
        ServeDeploySchema.model_validate(document)
    except ValidationError as error:
        raise ValueError("\n".join(describe_errors(error, document, ServeConfig))) from error
    if wrong := describe_truth_values(document, ServeConfig):
        raise ValueError("\n".join(wrong))
    return config


@contextmanager
def running(
    config: ServeConfig,
    *,
    on_open: Callable[[str], None] = lambda url: None,
    on_wait: Callable[[str], None] = lambda reason: None,
) -> Iterator[str]:
    """Yield the URL of the ready application. Start a local Ray cluster unless one is connected.

    ``on_open`` receives the URL once its port is taken. ``on_wait`` repeatedly receives what is still missing. The end
    of the block, Ctrl-C and SIGTERM stop what was started here; running requests have ``door.drain_s`` to finish.
    ValueError, before the start, with all problems of ``config`` on this machine, or if Serve already runs in the
    cluster.
    """
    config = with_metrics_port(config)
    with ExitStack() as stack:  # an error or a second Ctrl-C at one end does not stop the other
        is_local = not ray.is_initialized()
        if is_local:
            check(config)
        elif serve.status().proxies:
            raise ValueError("Ray Serve is already running in this cluster, at an address of its own: `serve shutdown`")
        starts, began_s = start_times_of(config.app), time.monotonic()
        entrance = stack.enter_context(Entrance.opened(config, starts.get(WHOLE_START) or 0.0))
        on_open(entrance.url)
        if is_local:
            stack.enter_context(local_cluster(config))
        else:
            stack.callback(serve.shutdown)
        _deploy(config, entrance)
        wait_ready(entrance.url, on_wait, ready_deadline_s(config))
        starts.learn(WHOLE_START, time.monotonic() - began_s)
        starts.save()
        stack.enter_context(
            Heartbeat("Serve's controller", lambda: controller_answers(ANSWER_WITHIN_S), restart_controller)
        )
        stack.callback(end_application, entrance, config.app.door.drain_s)
        yield entrance.url


@dataclass(frozen=True, kw_only=True, slots=True)
class Entrance:
    """The clients' address, and the address of Ray's proxy."""

    url: str
    """Address for clients."""
    backend: tuple[str, int]
    """Host and port of Ray's proxy; without a door, those of ``url``."""
    door: Door | None
    """None without HAProxy."""

    @classmethod
    @contextmanager
    def opened(cls, config: ServeConfig, start_s: float = 0.0) -> Iterator[Entrance]:
        """Listen at the configured address until the block ends. ValueError if it is taken.

        The start of the application is expected to take ``start_s``.
        """
        host = config.http_options.host
        listener = listen(host, config.http_options.port)
        port = int(listener.getsockname()[1])
        url = url_at(host, port)
        if find_binary() is None:
            listener.close()
            logger.warning("no HAProxy: Ray's proxy accepts requests itself, without limits on heads and connections")
            yield cls(url=url, backend=(host, port), door=None)
            return
        with reserved_port(LOOPBACK) as own_port:
            backend = (LOOPBACK, own_port)
            api = config.app.api
            queue = PictureQueue.of(config.app)
            origins = api.allowed_origins
            with Door(listener, backend, config.app.door, api.trusted_proxies, queue, origins, start_s) as door:
                yield cls(url=url, backend=backend, door=door)


def end_limit_s(drain_s: float) -> float:
    """Return how long a server may take to end: all its limits, the last that of the cluster itself."""
    return sum(limit_s for _, _, limit_s in _endings(drain_s)) + 2 * SHUTDOWN_WITHIN_S


def _endings(drain_s: float) -> tuple[tuple[str, Callable[[], object], float], ...]:
    """Return the steps of an orderly end, each with its limit in seconds."""
    return (
        ("an answer of the object store", partial(ray.put, bytes(STORED_BYTES)), STORED_WITHIN_S),
        ("draining", partial(_drain, drain_s), drain_s + 2 * DRAIN_MARGIN_S),
        ("deletion", partial(serve.delete, APPLICATION), DELETE_WITHIN_S),
    )


def end_application(entrance: Entrance, drain_s: float) -> None:
    """Drain the application, with 503 for new requests; then delete it, and return when all replicas are gone.

    If a step takes too long, the rest is skipped; so it is if the raylet, which holds the object store, hangs.
    """
    if entrance.door is not None:
        entrance.door.drain()
    for what, work, limit_s in _endings(drain_s):
        if not Limited(partial(_quietly, work)).ends_within(limit_s):
            logger.warning("the application cannot end in order: %s takes too long", what, extra={"waited_s": limit_s})
            return


def _quietly(work: Callable[[], object]) -> None:
    with suppress(RayServeException, RayError, TimeoutError):  # Serve or the ingress is gone
        work()


def _drain(drain_s: float) -> None:
    ingress = serve.get_deployment_handle(INGRESS, APPLICATION)
    ingress.broadcast("drain", drain_s).results(timeout_s=drain_s + DRAIN_MARGIN_S)


def ready_deadline_s(config: ServeConfig) -> float:
    """Return how long all models may take to start; those that share GPUs load one after the other."""
    starts_s: dict[str, float] = {}
    for model in config.app.models:
        group = model.share or f"{model.name} alone"
        starts_s[group] = starts_s.get(group, 0.0) + model.denoiser.start_deadline_s
    return max(READY_DEADLINE_S, max(starts_s.values()) + START_MARGIN_S)


def _deploy(config: ServeConfig, entrance: Entrance) -> None:
    host, port = entrance.backend
    options = config.http_options.model_dump() | {"host": host, "port": port}
    serve.start(
        proxy_location=config.proxy_location, http_options=options, logging_config=config.logging_config or None
    )
    app = config.app if entrance.door is None else behind_door(config.app)
    target = serve.RunTarget(target=build_app(app), name=APPLICATION, route_prefix="/")
    serve.run_many([target], wait_for_applications_running=False)


def behind_door(app: AppConfig) -> AppConfig:
    """Return ``app`` with all proxies trusted: the door passes on headers of trusted ones only."""
    return app.model_copy(update={"api": replace(app.api, trusted_proxies=ANY_NETWORK)})


@contextmanager
def reserved_port(host: str) -> Iterator[int]:
    """Yield a port for Serve's proxies, which do not report theirs; no other process gets it as a free port.

    Proxies can bind it, with SO_REUSEPORT as on the socket here, which does not listen.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((host, 0))
        yield int(holder.getsockname()[1])


def wait_ready(url: str, on_wait: Callable[[str], None], deadline_s: float) -> None:
    """Poll ``GET /health`` until it answers 200. TimeoutError carries the last reason."""
    end_s, reason, serve_check_s = time.monotonic() + deadline_s, "starting", 0.0
    with http_client(url, base_url=url, timeout=5.0) as client:  # its construction takes as long as many polls
        while (now_s := time.monotonic()) < end_s:
            reason = _not_ready(client)
            if not reason:
                return
            if now_s - serve_check_s > SERVE_POLL_S:
                _raise_if_failed()
                serve_check_s = now_s
            on_wait(reason)
            time.sleep(HEALTH_POLL_S)
    raise TimeoutError(f"not ready after {deadline_s:.0f} s: {reason}")


def _not_ready(client: httpx.Client) -> str:
    """Return what ``GET /health`` reports as missing; empty if ready."""
    try:
        response = client.get("/health")
    except httpx.TransportError as error:
        return f"the server does not answer yet ({type(error).__name__})"
    if response.status_code == httpx.codes.OK:
        return ""
    if response.status_code not in PASSING:
        raise RuntimeError(f"GET /health answered {response.status_code}: {response.text}")
    return _reason(response)


def _reason(response: httpx.Response) -> str:
    """Return the models' states that are not ready, or the message of the door or Ray's proxy."""
    try:
        document = response.json()
    except ValueError:  # Ray's proxy
        return response.text
    if "models" not in document:  # the door
        return "the application is starting"
    return "; ".join(state for state in document["models"].values() if state != "ready")


def _raise_if_failed() -> None:
    """Raise RuntimeError with Serve's messages if a deployment has failed, and with what the GPU had no memory for."""
    application = application_status()
    if application is None or application.status != ApplicationStatus.DEPLOY_FAILED:
        return
    messages = {name: one.message for name, one in application.deployments.items() if one.message}
    reasons = [f"{name}: {message}" for name, message in messages.items()]
    lacks = () if (logs := log_folder()) is None else memory_failures(logs, messages)
    raise RuntimeError("\n".join(("the application cannot start", *lacks, *reasons)))
