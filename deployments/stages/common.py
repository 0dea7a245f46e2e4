"""What text encoders and decoders have in common: one model's part on one device."""

from __future__ import annotations

from dataclasses import dataclass

from deployments.config import ModelConfig
from deployments.observability.logs import configure_logs
from deployments.stages.config import StageConfig
from pipelines.checkpoint import Checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSpec:
    """A model's configuration and that of the one stage in question."""

    model: ModelConfig
    stage: StageConfig


def load_stage(spec: StageSpec) -> Checkpoint:
    """Set this process's threads; give the checkpoint on the device of the stage."""
    import torch

    configure_logs()
    torch.set_num_threads(spec.stage.num_threads)
    return Checkpoint.open(spec.model.source, "cuda" if spec.stage.num_gpus else "cpu", spec.model.dtype)
