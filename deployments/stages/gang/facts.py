"""What is kept of measurements belongs to a model as it is configured, and to the software that runs it."""

from __future__ import annotations

from importlib.metadata import version

from deployments.config import ModelConfig
from deployments.names import own_version


def model_facts(model: ModelConfig) -> dict[str, str]:
    return {"model": repr([model.source, model.dtype, [repr(lora) for lora in model.loras]])}


def software_facts() -> dict[str, str]:
    names = ("torch", "diffusers")
    return {"troupe": own_version(), **{name: version(name) for name in names}}
