"""Start and stop the whole application from one process: what the command line, the demo and the tests use."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import ray
import yaml
from pydantic import ValidationError
from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus, ServeDeploySchema

from deployments.app import REPLICA_CPUS, build_app
from deployments.config import ServeConfig
from deployments.mistakes import mistakes
from deployments.names import APPLICATION

CONFIGS = Path(__file__).parents[1] / "configs"
READY_DEADLINE_S = 900.0
"""For the application to be ready, unless its gangs may take longer to start."""
START_MARGIN_S = 300.0
"""What comes before and after the slowest gang's start."""
SERVE_ENVIRONMENT = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}
"""One event loop per replica instead of two: nothing that is awaited here takes long, and each way between loops costs
a request time. To be set where a cluster's nodes are started, since replicas inherit it from there."""
SERVE_POLL_S = 1.0
"""Between two looks at whether Serve has given up: its controller, busy at start, takes some 10 ms of CPU for each."""


def load_config(name: str | Path) -> ServeConfig:
    """Reads a config file, or a shipped config by its bare name ("laptop"). ValueError lists what is there."""
    path = Path(name)
    if not path.is_file():
        path = CONFIGS / f"{name}.yaml"
    if not path.is_file():
        shipped = ", ".join(sorted(file.stem for file in CONFIGS.glob("*.yaml")))
        raise ValueError(f"{name} is neither a file nor a shipped config; shipped: {shipped}")
    try:
        return parse_config(yaml.safe_load(path.read_text()))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error


def parse_config(document: Mapping[str, Any]) -> ServeConfig:
    """Checks by ours, and by Ray Serve's own schema, since ``serve deploy`` must take the same file.

    ValueError has a line for each mistake.
    """
    try:
        config = ServeConfig.model_validate(document)
        ServeDeploySchema.model_validate(document)
    except ValidationError as error:
        raise ValueError("\n".join(mistakes(error, document, ServeConfig))) from error
    return config


@contextmanager
def running(config: ServeConfig, *, on_wait: Callable[[str], None] = lambda reason: None) -> Iterator[str]:
    """Yields the URL of the application, up and ready. Starts a local Ray cluster unless one is connected already.

    ``on_wait`` gets, again and again until everything is ready, what is still missing. Whatever was started here is
    ended on the way out, on Ctrl-C too.
    """
    with ExitStack() as stack:  # one end failing, or a second Ctrl-C in it, does not stop the other
        if ray.is_initialized():
            stack.callback(serve.shutdown)
        else:
            stack.callback(ray.shutdown)
            with interrupts_later():
                _start_cluster(config)
            stack.callback(_end_application)  # Serve itself ends with the cluster
        url = _deploy(config)
        wait_ready(url, on_wait, ready_deadline_s(config))
        yield url


@contextmanager
def interrupts_later() -> Iterator[None]:
    """Turns a Ctrl-C inside the block into a KeyboardInterrupt at its end.

    For blocks that fork: an interrupted child prints a traceback before it has become what it was forked for. In other
    threads than the main one, where Python handles no signals, it changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if held:
        raise KeyboardInterrupt


def _start_cluster(config: ServeConfig) -> None:
    """Starts a local cluster, without the lines of log that Ray and Serve write for each."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    quiet = logging.getLogger("ray._private.authentication.authentication_token_setup")
    quiet.addFilter(lambda record: "is enabled" not in record.getMessage())
    for name, value in SERVE_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    ray.init(
        address="local",  # whatever RAY_ADDRESS says: on a cluster that runs already, `serve deploy` takes the file
        runtime_env=config.applications[0].runtime_env or None,
        num_cpus=num_logical_cpus(config),
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=True,
        logging_level=logging.WARNING,
    )


def _end_application() -> None:
    """Gangs release their engines, then their communicators; returns when all replicas are gone."""
    with suppress(RayServeException):  # there is no Serve yet
        serve.delete(APPLICATION)


def num_logical_cpus(config: ServeConfig) -> int:
    """Returns the logical CPUs for a local cluster: the machine's, or what the config asks for if that is more."""
    num_cpus = config.app.api.num_replicas * config.app.api.num_cpus + 1.0
    for model in config.app.models:
        for stage in (model.text_encoder, model.decoder):
            num_cpus += stage.max_num_replicas * stage.num_cpus
        denoiser = model.denoiser
        num_cpus += denoiser.max_num_replicas * (REPLICA_CPUS + denoiser.num_ranks * denoiser.cpus_per_rank)
    return max(os.cpu_count() or 1, int(num_cpus) + 1)


def ready_deadline_s(config: ServeConfig) -> float:
    slowest_s = max(model.denoiser.start_deadline_s for model in config.app.models)
    return max(READY_DEADLINE_S, slowest_s + START_MARGIN_S)


def _deploy(config: ServeConfig) -> str:
    options = config.http_options.model_dump()
    options["port"] = options["port"] or free_port(config.http_options.host)
    serve.start(
        proxy_location=config.proxy_location, http_options=options, logging_config=config.logging_config or None
    )
    target = serve.RunTarget(target=build_app(config.app), name=APPLICATION, route_prefix="/")
    serve.run_many([target], wait_for_applications_running=False)
    return f"http://{options['host']}:{options['port']}"


def free_port(host: str) -> int:
    """Returns a port that was free a moment ago (Serve cannot be asked which port it took)."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def wait_ready(url: str, on_wait: Callable[[str], None], deadline_s: float) -> None:
    """Polls ``GET /health`` until it answers 200. TimeoutError carries the last reason."""
    end_s, reason, asked_serve_s = time.monotonic() + deadline_s, "starting", 0.0
    with httpx.Client(base_url=url, timeout=5.0) as client:  # making one takes as long as many polls
        while (now_s := time.monotonic()) < end_s:
            reason = _not_ready(client)
            if not reason:
                return
            if now_s - asked_serve_s > SERVE_POLL_S:
                _raise_if_failed()
                asked_serve_s = now_s
            on_wait(reason)
            time.sleep(0.2)
    raise TimeoutError(f"not ready after {deadline_s:.0f} s: {reason}")


def _not_ready(client: httpx.Client) -> str:
    """Returns what is missing, by ``GET /health``; empty if nothing is."""
    try:
        response = client.get("/health")
    except httpx.TransportError as error:
        return f"the server does not answer yet ({type(error).__name__})"
    if response.status_code == httpx.codes.OK:
        return ""
    if response.status_code != httpx.codes.SERVICE_UNAVAILABLE:
        raise RuntimeError(f"GET /health answered {response.status_code}: {response.text}")
    return _reason(response)


def _reason(response: httpx.Response) -> str:
    """Returns what each model waits for; whatever the proxy says as long as it answers in our place."""
    try:
        return "; ".join(state for state in response.json()["models"].values() if state != "ready")
    except ValueError:
        return response.text


def _raise_if_failed() -> None:
    """Raises RuntimeError with Serve's own message if it has given up on a deployment."""
    application = serve.status().applications.get(APPLICATION)
    if application is None or application.status != ApplicationStatus.DEPLOY_FAILED:
        return
    reasons = [f"{name}: {one.message}" for name, one in application.deployments.items() if one.message]
    raise RuntimeError("\n".join(("the application cannot start", *reasons)))
