"""What the stages have in common: one model's part on one device, and what they hand to each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """Conditioning, left in the object store by a text encoder, and the seconds it took: tensors stay there."""

    conditioning: ray.ObjectRef[Any]
    encode_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoded:
    """Finished bytes from a decoder; ``thumbnail`` is empty for pictures."""

    data: bytes
    thumbnail: bytes
    decode_s: float


def load_stage(spec: StageSpec) -> tuple[Family, Path, torch.device, torch.dtype]:
    """Sets this process's threads; returns the family, its directory, the device and the dtype to load with."""
    import torch

    configure_logs()
    torch.set_num_threads(spec.stage.num_threads)
    device = torch.device("cuda" if spec.stage.num_gpus else "cpu")
    path = resolve_path(spec.model.source)
    return load_family(path), path, device, resolve_dtype(spec.model.dtype, device)
