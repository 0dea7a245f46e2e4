"""Files of measured step and decode times in the data directory, and estimates before the first measurement."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from deployments.config import AppConfig
from deployments.model_config import ModelConfig
from deployments.names import own_version
from deployments.service.interface import MediaFormat, Output
from deployments.settings import Settings
from engines.core.estimates import StepEstimates
from engines.core.parcel import Shapes
from engines.core.storage import device_name, file_about
from engines.gang.eta.measured_times import MeasuredTimes, StepTimes, TimeKey
from engines.gang.eta.prediction import rough_step_s
from pipelines.loading import HUB_FILES, ModelSource, local_path
from pipelines.request import MediaRequest

if TYPE_CHECKING:
    from engines.gang.rank import RankInfo


NUM_DECODES_NEEDED = 3
"""Decodes whose median corrects a stored time; the first one of a process may be slow."""
PIXELS_PER_TOKEN = 16 * 16
FRAMES_PER_TOKEN = 4
"""Typical of transformers of 2026; the first frame has tokens of its own."""
FACTORS = (
    *("engine", "strategy", "precision", "attention", "num_ranks", "num_nodes", "threads_per_rank"),
    *("compile", "torch", "tensorrt", "nccl"),
)
"""Configuration fields of a denoiser that affect step time."""
NEEDED = ("torch", "diffusers", "transformers")
OPTIONAL = ("triton", "fa3-fwd", "tensorrt", "tensorrt-rtx-cu13-libs")
"""Packages that steps use if installed."""
BLOBS = "blobs"
WHOLE_START: TimeKey = ("", 0)
"""Key of the time from the command until all models of an application are ready."""

DecodeKey = tuple[MediaFormat, int]
"""Format of the file, and pixels of all frames or layers."""


class DecodeTimes(MeasuredTimes):
    """Times from latents to the bytes of a file, by ``DecodeKey``."""

    def __init__(self, file: Path | None = None) -> None:
        super().__init__(file, "decodes", num_needed=NUM_DECODES_NEEDED)


def decode_key(request: MediaRequest, output: Output) -> DecodeKey:
    """Return the key of a decode."""
    return output.format, request.width * request.height * max(request.num_frames, request.num_layers)


def decode_times_of(model: ModelConfig, folder: Path, devices: Sequence[str]) -> DecodeTimes:
    """Return the measured decodes of ``model``, a checkpoint in ``folder``, on ``devices`` of torch."""
    facts = {
        "devices": [device_name(device) for device in devices],
        **model_facts(model, folder),
        "decoder": {"compile": model.decoder.compile, "memory_gib": model.decoder.memory_gib, "stages": model.stages},
        **software_facts(),
    }
    return DecodeTimes(file_about(Settings().data_dir / "decode_times", model.name, facts))


def step_times_of(
    model: ModelConfig, folder: Path, infos: Sequence[RankInfo], estimates: StepEstimates | None
) -> StepTimes:
    """Return the measured steps of ``model``, a checkpoint in ``folder``, on the ranks ``infos``.

    With ``estimates`` the file differs, since it holds corrections relative to them.
    """
    facts = {
        "devices": [info.device_name for info in infos],
        **model_facts(model, folder),
        "denoiser": {name: repr(getattr(model.denoiser, name)) for name in FACTORS},
        **software_facts(),
        **({"estimates": "of the cost model"} if estimates else {}),
    }
    return StepTimes(file_about(Settings().data_dir / "step_times", model.name, facts))


def start_times_of(app: AppConfig) -> MeasuredTimes:
    """Return the measured starts of an application's models, by ``start_key``, and of the whole (``WHOLE_START``)."""
    facts = {"models": [model.model_dump(mode="json") for model in app.models], **software_facts()}
    return MeasuredTimes(file_about(Settings().data_dir / "start_times", "application", facts), "starts")


def start_key(model: str) -> TimeKey:
    """Return the key of the start of ``model``."""
    return model, 1


def estimates_s_of(
    request: MediaRequest, encoded: Shapes, estimates: StepEstimates | None, references: str = ""
) -> dict[int, float]:
    """Return the estimated seconds of a step by team size, up to one factor for all steps of the model.

    Without ``estimates`` of the cost model, the number of tokens decides, on one rank. ``references`` is the model's
    ``reference_latents``.
    """
    frames = 1 + (request.num_frames - 1) / FRAMES_PER_TOKEN + request.num_layers  # and the whole picture
    num_tokens = frames * request.width * request.height / PIXELS_PER_TOKEN + num_text_tokens(encoded)
    num_tokens += num_reference_tokens(encoded, references) if references else 0
    num_branches = 2 if request.true_cfg_scale > 1 else 1
    return estimates.step_s(num_tokens, num_branches) if estimates else {1: rough_step_s(num_tokens, num_branches)}


def num_text_tokens(encoded: Shapes) -> int:
    """Return the length of the longest sequence in a conditioning of shapes ``encoded``."""
    return max((shape[1] for _, shape in encoded if len(shape) == 3), default=0)


def num_reference_tokens(encoded: Shapes, name: str) -> int:
    """Return the latents' places of all values ``name``, of shapes (1, C, frames, rows, columns), in ``encoded``."""
    return sum(math.prod(shape[2:]) for other, shape in encoded if other.partition(".")[0] == name)


def model_facts(model: ModelConfig, folder: Path) -> dict[str, str]:
    """Return the cache key of a model: its configuration, and the state of its files in ``folder``."""
    loaded = {path for pattern in HUB_FILES for path in folder.glob(pattern)}
    files = [*sorted(loaded), *_single_files(model)]
    return {
        "model": repr([model.source, model.dtype, [repr(lora) for lora in model.adapters]]),
        "files": repr([_state(path) for path in files]),
    }


def _single_files(model: ModelConfig) -> Iterable[Path]:
    """Yield weights outside the folder: a single-file transformer, and local adapters."""
    if file := ModelSource.parse(model.source).file:
        yield Path(file)
    for lora in model.adapters:
        path = local_path(lora.path)
        files = [path] if path.is_file() else [*path.glob("*.safetensors"), *([path / lora.file] if lora.file else [])]
        yield from sorted({file for file in files if file.is_file()})


def _state(path: Path) -> tuple[str, int, int | str]:
    """Return name, size and mtime; for a link into the hub's blobs, the blob's name (a digest) instead of mtime."""
    status, target = path.stat(), path.resolve()
    return path.name, status.st_size, target.name if target.parent.name == BLOBS else status.st_mtime_ns


def software_facts() -> dict[str, str]:
    """Return the versions of the packages that steps use."""
    facts = {"troupe": own_version(), **{name: version(name) for name in NEEDED}}
    for name in OPTIONAL:
        with suppress(PackageNotFoundError):
            facts[name] = version(name)
    return facts
