"""The names of models' licences, as their pages on the hub give them; what is not here was not found."""

from __future__ import annotations

APACHE = "Apache-2.0"
FLUX1_DEV = "FLUX.1 [dev] Non-Commercial License"
FLUX = "FLUX Non-Commercial License"
FLUX3 = "FLUX Kommunity License"
HUNYUAN = "Tencent Hunyuan Community License"
COSMOS = "OpenMDW-1.1"
KREA = "Krea 2 Community License"
QWEN21 = "Qwen Research License"
STABILITY = "Stability AI Community License"
NOT_FOUND = "see its page"

LICENCES = {
    "Cosmos3": COSMOS,
    "ERNIE-Image": APACHE,
    "FLUX.1-Kontext-dev": FLUX1_DEV,
    "FLUX.1-dev": FLUX1_DEV,
    "FLUX.1-schnell": APACHE,
    "FLUX.2-dev": FLUX,
    "FLUX.2-klein-4B": APACHE,
    "Helios": APACHE,
    "HunyuanVideo-1.5": HUNYUAN,
    "Krea-2": KREA,
    "LTX-2": "LTX-2 Community License",
    "LTX-2.5": "LTX-2.x Community License",
    "LTX-Video": "LTXV Open Weights License",
    "MiniMax-H3": "MiniMax H3 Community License",
    "Qwen-Image": APACHE,
    "Qwen-Image-2.1": QWEN21,
    "Wan2": APACHE,
    "Z-Image": APACHE,
    "flux-3-image-klein": FLUX3,
    "ideogram-4": "Ideogram Non-Commercial Model Agreement",
    "stable-diffusion-3": STABILITY,
    "stable-diffusion-xl": "CreativeML Open RAIL++-M",
}
"""By the beginning of a model's name; the longest counts."""
UNPUBLISHED = {
    "Cosmos3DistilledPipeline": "Cosmos3",
    "HeliosPyramidDistilledPipeline": "Helios",
    "HeliosPyramidPipeline": "Helios",
    "LTX25Pipeline": "LTX-2.5",
    "QwenImage21TurboPipeline": "Qwen-Image-2.1-Turbo",
}
"""Models of pipelines of which no configuration comes with the project."""


def licence_of(model: str) -> str:
    known = [name for name in LICENCES if model.startswith(name)]
    return LICENCES[max(known, key=len)] if known else NOT_FOUND
