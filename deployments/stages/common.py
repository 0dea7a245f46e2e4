"""What text encoders and decoders have in common: one model's part on one device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deployments.config import ModelConfig, StageConfig
from deployments.observability.logs import configure_logs
from pipelines.family import Family
from pipelines.loading import resolve_dtype, resolve_path
from pipelines.registry import load_family

if TYPE_CHECKING:  # whoever starts the application imports its deployments, and does without torch
    import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSpec:
    """A model's configuration and that of the one stage in question."""

    model: ModelConfig
    stage: StageConfig


def load_stage(spec: StageSpec) -> tuple[Family, Path, torch.device, torch.dtype]:
    """Set this process's threads; give the family, its directory, the device and the dtype to load with."""
    import torch

    configure_logs()
    torch.set_num_threads(spec.stage.num_threads)
    device = torch.device("cuda" if spec.stage.num_gpus else "cpu")
    path = resolve_path(spec.model.source)
    return load_family(path), path, device, resolve_dtype(spec.model.dtype, device)
