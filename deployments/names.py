"""Names of the application and its deployments, as Serve, its metrics and its logs show them."""

from __future__ import annotations

APPLICATION = "troupe"
INGRESS = "Ingress"
STAGES = {"text_encoder": "TextEncoder", "denoiser": "Denoiser", "decoder": "VaeDecoder"}
"""Stage (the attribute of ``StageHandles``) to how the names of its deployments begin."""


def deployment_name(stage: str, model: str) -> str:
    return f"{STAGES[stage]}-{model}"
