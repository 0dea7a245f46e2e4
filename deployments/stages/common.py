"""What the stages have in common: one model's part on one device, and what they hand to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deployments.config import ModelConfig, ProvenanceConfig
from deployments.settings import set_defaults
from deployments.stages.config import StageConfig
from deployments.stages.devices import stage_devices
from engines.core.transport.parcel import Parcel, Shapes
from engines.gang.errors import QueueFullError
from engines.gang.jobs.job import JobEvent
from pipelines.checkpoint import Checkpoint
from pipelines.request import MetadataLevel


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSpec:
    """A model's configuration, that of the one stage in question, what files say of how they were made, and who
    signs them."""

    model: ModelConfig
    stage: StageConfig
    metadata: MetadataLevel = "full"
    provenance: ProvenanceConfig | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded(Parcel):
    """Conditioning, the seconds it took a text encoder, and the ``shapes`` of its tensors by name: jobs of a size whose
    prompts and pictures are as long share compiled programs. ``was_kept``: from a request before that said the same."""

    encode_s: float
    shapes: Shapes
    was_kept: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodingDone:
    """The first event of a job: its conditioning is there, and took ``encode_s``; or it ``was_kept``."""

    encode_s: float
    was_kept: bool = False


StageEvent = EncodingDone | JobEvent | QueueFullError
"""What a denoiser says of a job. A refusal is its only event: Serve logs a traceback of whatever is raised."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoded:
    """Finished bytes from a decoder; ``thumbnail`` is empty for pictures, ``further`` are layers above the first."""

    data: bytes
    thumbnail: bytes
    decode_s: float
    further: tuple[bytes, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """Files travel as arrays, as pictures do on their way to the encoder: Ray copies them once on either side, and
        bytes in a pickle five times."""
        files_B = tuple(np.frombuffer(file, np.uint8) for file in (self.data, *self.further))
        return _decoded, (files_B, self.thumbnail, self.decode_s)


def _decoded(files_B: Sequence[NDArray[np.uint8]], thumbnail: bytes, decode_s: float) -> Decoded:
    data, *further = (file_B.tobytes() for file_B in files_B)
    return Decoded(data=data, thumbnail=thumbnail, decode_s=decode_s, further=tuple(further))


GIVES_WAY = {"CUDA_MPS_CLIENT_PRIORITY": "1"}
"""Below the normal one, 0, which ranks have. CUDA reads it when a process begins to use a GPU, and obeys it under MPS
alone: priorities of streams end at a process, and without MPS the processes that share a GPU take turns on it."""


def load_stage(spec: StageSpec) -> Checkpoint:
    """Set this process's threads and its place among those that share its GPU; returns the checkpoint on the device of
    the stage."""
    import torch

    from deployments.replicas import prepare_replica  # ranks, which read what stages write, do without Ray Serve

    prepare_replica()
    if spec.stage.gives_way:
        set_defaults(GIVES_WAY)
    torch.set_num_threads(spec.stage.num_threads)
    return Checkpoint.open(spec.model.source, stage_devices(spec.stage)[0], spec.model.dtype)
