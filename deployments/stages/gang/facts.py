"""What is kept of measurements belongs to a model as it is configured, and to the software that runs it."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from deployments.config import ModelConfig
from deployments.names import own_version


def model_facts(model: ModelConfig) -> dict[str, str]:
    return {"model": repr([model.source, model.dtype, [repr(lora) for lora in model.loras]])}


def software_facts() -> dict[str, str]:
    """Versions, of optional packages that steps call where they are installed as well."""
    facts = {"troupe": own_version(), **{name: version(name) for name in ("torch", "diffusers")}}
    for name in ("fa3-fwd",):
        with suppress(PackageNotFoundError):
            facts[name] = version(name)
    return facts
