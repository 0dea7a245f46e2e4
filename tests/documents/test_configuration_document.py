"""docs/reference/configuration.md names every key of the configuration, with its default."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, cast

import pytest

from deployments import config
from deployments.clips.webhooks import KeyWebhook, WebhookSettings
from deployments.door.door_settings import DoorSettings
from deployments.model_config import ModelConfig
from deployments.observability.metrics_settings import MetricsSettings
from deployments.requests.enhancer_config import PromptEnhancerConfig
from deployments.stages import stage_config as stages
from deployments.usage.quotas import KeyLimits
from engines.parallel.nccl_options import NcclOptions
from engines.tensorrt_engine.rules import TensorRTOptions
from engines.torch_engine.options import TorchOptions
from pipelines.lora.source import LoraLimits, LoraSource
from tests.support.fenced import ROOT

ROWS = dict(
    re.findall(
        r"^\| `([\w.]+)` \| ([^|]*) \|", (ROOT / "docs" / "reference" / "configuration.md").read_text(), re.MULTILINE
    )
)
SECTIONS: dict[str, Any] = {
    "http_options.": config.HttpOptions,
    "loras.": LoraSource,
    "runtime_loras.": LoraLimits,
    "prompt_enhancer.": PromptEnhancerConfig,
    "shares.": config.ShareConfig,
    "key_limits.": KeyLimits,
    "text_encoder.": stages.EncoderConfig,
    "decoder.": stages.DecoderConfig,
    "autoscaling.": stages.AutoscalingConfig,
    "denoiser.": stages.DenoiserConfig,
    "denoiser.autoscaling.": stages.GangScalingConfig,
    "denoiser.torch.": TorchOptions,
    "denoiser.tensorrt.": TensorRTOptions,
    "denoiser.nccl.": NcclOptions,
    "api.": config.ApiConfig,
    "provenance.": config.ProvenanceConfig,
    "webhooks.": WebhookSettings,
    "webhooks.keys.": KeyWebhook,
    "metrics.": MetricsSettings,
    "door.": DoorSettings,
}
UNNAMED = (config.ServeConfig, config.ApplicationConfig, config.AppConfig, ModelConfig)
SAID_ELSEWHERE = {"applications", "args", "import_path", "route_prefix", "text_encoder", "denoiser", "decoder"}
SAID_ELSEWHERE |= {"models", "api", "door", "metrics", "http_options", "autoscaling", "torch", "tensorrt", "nccl"}
"""Sections, which have keys of their own, and keys that are the same in every file."""
OF_OTHERS = {
    "decoder.": {field.name for field in dataclasses.fields(stages.StageConfig)},
    "denoiser.autoscaling.": set(stages.AutoscalingConfig.model_fields),
}
"""Keys whose rows are with the text encoder, or with all that scales."""


def keys() -> dict[str, Any]:
    """Return the default of each key; a required one has ``...``."""
    sections = [("", model) for model in UNNAMED] + list(SECTIONS.items())
    return {
        f"{prefix}{name}": default
        for prefix, section in sections
        for name, default in defaults_of(section).items()
        if name not in SAID_ELSEWHERE and name not in OF_OTHERS.get(prefix, ())
    }


def defaults_of(section: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(section):
        required = {field.name: ... for field in dataclasses.fields(section) if is_required(field)}
        plain = cast("Any", section)(**dict.fromkeys(required, "given"))
        return {field.name: getattr(plain, field.name) for field in dataclasses.fields(section)} | required
    fields = section.model_fields.items()
    return {name: ... if field.is_required() else field.default for name, field in fields}


def is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def test_every_key_is_there_and_no_other() -> None:
    assert {row for row in ROWS if "." in row or row in keys()} == set(keys())


@pytest.mark.parametrize(("key", "default"), keys().items())
def test_defaults_are_those_of_the_code(key: str, default: Any) -> None:
    assert ROWS[key] == default_text(default)


def default_text(default: Any) -> str:
    match default:
        case bool():
            return str(default).lower()
        case float():
            return f"{default:g}"
    return "required" if default is ... else str(default or "none")
