"""Names of the application, its deployments, its package and its addresses."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "troupe-serve"
"""On the package index, where ``troupe`` alone is somebody else's."""
APPLICATION = "troupe"
INGRESS = "Ingress"
ACCOUNTS = "Accounts"
FULL_HEADER = "X-Troupe-Full"
"""Of a refusal because no picture has a place, whatever it asks for: seconds until all under way will be finished."""
HEALTH = "/health"
"""The path at which the application says which models can take requests."""
LIVE = "/live"
"""The path at which the application says that it takes requests."""
STAGES = {"text_encoder": "TextEncoder", "denoiser": "Denoiser", "decoder": "VaeDecoder"}
"""Stage (the attribute of ``StageHandles``) to how the names of its deployments begin."""
CODEC = "Codec"
"""How the name of a deployment begins that is a model's text encoder and its decoder."""
LOOPBACK_OF = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
"""Maps wildcard bind addresses to loopback addresses that clients can use."""


def deployment_name(stage: str, model: str) -> str:
    return f"{STAGES[stage]}-{model}"


def url_at(host: str, port: int) -> str:
    """Return the URL, without a path, at which this machine reaches who listens on ``host``, a name or an address."""
    reached = LOOPBACK_OF.get(host, host)
    return f"http://{f'[{reached}]' if ':' in reached else reached}:{port}"


def own_version() -> str:
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:  # run from a source tree that was not installed
        return "0"
