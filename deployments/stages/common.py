"""Types that the stages share and exchange, and the opening of a stage's checkpoint."""

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
    """Configuration of one stage of a model, and of the metadata and signature of its files."""

    model: ModelConfig
    stage: StageConfig
    metadata: MetadataLevel = "full"
    provenance: ProvenanceConfig | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded(Parcel):
    """Conditioning of one request."""

    encode_s: float
    shapes: Shapes
    """Shapes of its tensors by name."""
    was_kept: bool = False
    """Whether it comes from the cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodingDone:
    """The first event of a job: its conditioning, encoded in ``encode_s`` or from the cache (``was_kept``)."""

    encode_s: float
    was_kept: bool = False


StageEvent = EncodingDone | JobEvent | QueueFullError
"""Events of a job. A refusal is an event, since Serve logs a traceback of every exception."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoded:
    """Finished files; ``thumbnail`` is empty for pictures, ``further`` are the layers above the first."""

    data: bytes
    thumbnail: bytes
    decode_s: float
    further: tuple[bytes, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the files as arrays: Ray copies arrays once on either side, bytes five times."""
        files_B = tuple(np.frombuffer(file, np.uint8) for file in (self.data, *self.further))
        return _decoded, (files_B, self.thumbnail, self.decode_s)


def _decoded(files_B: Sequence[NDArray[np.uint8]], thumbnail: bytes, decode_s: float) -> Decoded:
    data, *further = (file_B.tobytes() for file_B in files_B)
    return Decoded(data=data, thumbnail=thumbnail, decode_s=decode_s, further=tuple(further))


GIVES_WAY = {"CUDA_MPS_CLIENT_PRIORITY": "1"}
"""Lower priority than that of ranks, 0. CUDA reads it at a process's first use of a GPU, and obeys it under MPS only.
Stream priorities hold within one process; without MPS, processes time-slice a GPU."""


def load_stage(spec: StageSpec) -> Checkpoint:
    """Set this process's threads and GPU priority; return the checkpoint on the device of the stage."""
    import torch

    from deployments.replicas import prepare_replica  # ranks import this module without Ray Serve

    prepare_replica()
    if spec.stage.gives_way:
        set_defaults(GIVES_WAY)
    torch.set_num_threads(spec.stage.num_threads)
    return Checkpoint.open(spec.model.source, stage_devices(spec.stage)[0], spec.model.dtype)
