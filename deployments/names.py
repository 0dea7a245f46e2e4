"""Names of the application, its deployments, its package and its URLs."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "troupe-serve"
"""Name on the package index, where ``troupe`` belongs to another project."""
APPLICATION = "troupe"
INGRESS = "Ingress"
ACCOUNTS = "Accounts"
FULL_HEADER = "X-Troupe-Full"
"""Header of a refusal because all places for pictures are taken: seconds until all running requests end."""
HEALTH = "/health"
"""Path of the models' readiness."""
LIVE = "/live"
"""Path of the application's own readiness."""
STAGES = {"text_encoder": "TextEncoder", "denoiser": "Denoiser", "decoder": "VaeDecoder"}
"""Prefix of a deployment's name by stage (attribute of ``StageHandles``)."""
CODEC = "Codec"
"""Prefix of the name of a deployment that is both text encoder and decoder."""
LOOPBACK_OF = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
"""Maps wildcard bind addresses to loopback addresses that clients can use."""


def deployment_name(stage: str, model: str) -> str:
    return f"{STAGES[stage]}-{model}"


def url_at(host: str, port: int) -> str:
    """Return the URL, without a path, at which this machine reaches a server that listens on ``host``."""
    target = LOOPBACK_OF.get(host, host)
    return f"http://{f'[{target}]' if ':' in target else target}:{port}"


def own_version() -> str:
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:  # run from a source tree
        return "0"
