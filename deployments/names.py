"""Names of the application and its deployments, as Serve, its metrics and its logs show them, and of its package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "troupe-serve"
"""On the package index, where ``troupe`` alone is somebody else's."""
APPLICATION = "troupe"
INGRESS = "Ingress"
STAGES = {"text_encoder": "TextEncoder", "denoiser": "Denoiser", "decoder": "VaeDecoder"}
"""Stage (the attribute of ``StageHandles``) to how the names of its deployments begin."""


def deployment_name(stage: str, model: str) -> str:
    return f"{STAGES[stage]}-{model}"


def own_version() -> str:
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:  # run from a source tree that was not installed
        return "0"
