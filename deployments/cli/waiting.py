"""Waiting for an application that was started: until it answers that it is ready, or Serve has given up."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx
from ray.serve.schema import ApplicationStatus

from deployments.cli.client import PASSING
from deployments.cli.local.proxies import http_client
from deployments.ray_private import application_status

SERVE_POLL_S = 1.0
"""Between two looks at whether Serve has given up: its controller, busy at start, takes some 10 ms of CPU for each."""
HEALTH_POLL_S = 0.5
"""Between two looks at what is missing, which take some 20 ms of CPU each; the application looks once a second."""


def wait_ready(url: str, on_wait: Callable[[str], None], deadline_s: float) -> None:
    """Poll ``GET /health`` until it answers 200. TimeoutError carries the last reason."""
    end_s, reason, asked_serve_s = time.monotonic() + deadline_s, "starting", 0.0
    with http_client(url, base_url=url, timeout=5.0) as client:  # making one takes as long as many polls
        while (now_s := time.monotonic()) < end_s:
            reason = _not_ready(client)
            if not reason:
                return
            if now_s - asked_serve_s > SERVE_POLL_S:
                _raise_if_failed()
                asked_serve_s = now_s
            on_wait(reason)
            time.sleep(HEALTH_POLL_S)
    raise TimeoutError(f"not ready after {deadline_s:.0f} s: {reason}")


def _not_ready(client: httpx.Client) -> str:
    """Return what is missing, by ``GET /health``; empty if nothing is."""
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
    """Return what each model waits for, or what who answers in the application's place says."""
    try:
        document = response.json()
    except ValueError:  # Ray's proxy
        return response.text
    if "models" not in document:  # the door
        return "the application is starting"
    return "; ".join(state for state in document["models"].values() if state != "ready")


def _raise_if_failed() -> None:
    """Raise RuntimeError with Serve's own message if it has given up on a deployment."""
    application = application_status()
    if application is None or application.status != ApplicationStatus.DEPLOY_FAILED:
        return
    reasons = [f"{name}: {one.message}" for name, one in application.deployments.items() if one.message]
    raise RuntimeError("\n".join(("the application cannot start", *reasons)))
