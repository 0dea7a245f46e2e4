"""Files of measured step and decode times in the data directory, and estimates before the first measurement."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deployments.config import ModelConfig
from deployments.settings import Settings
from deployments.stages.gang.facts import model_facts, software_facts
from deployments.studio.interface import MediaFormat, Output
from engines.core.estimates import StepEstimates
from engines.core.storage.devices import device_name
from engines.core.storage.files import file_about
from engines.core.transport.parcel import Shapes
from engines.gang.eta.measured_times import MeasuredTimes, StepTimes
from engines.gang.eta.prediction import rough_step_s
from pipelines.request import MediaRequest

if TYPE_CHECKING:
    from engines.gang.ranks.rank import RankInfo

NUM_DECODES_NEEDED = 3
"""Decodes whose median corrects a known time; the first one of a process may be slow."""
PIXELS_PER_TOKEN = 16 * 16
FRAMES_PER_TOKEN = 4
"""Typical of transformers of 2026; the first frame has tokens of its own."""
TIMED = ("engine", "strategy", "precision", "num_ranks", "num_nodes", "threads_per_rank", "torch", "tensorrt", "nccl")
"""Configuration fields of a denoiser that affect step time."""

DecodedLike = tuple[MediaFormat, int]
"""Format of the file, and pixels of all frames or layers."""


class DecodeTimes(MeasuredTimes):
    """Times from latents to the bytes of a file, by ``DecodedLike``."""

    def __init__(self, file: Path | None = None) -> None:
        super().__init__(file, "decodes", num_needed=NUM_DECODES_NEEDED)


def decoded_like(request: MediaRequest, output: Output) -> DecodedLike:
    """Return the key of a decode."""
    return output.format, request.width * request.height * max(request.num_frames, request.num_layers)


def decode_times_of(model: ModelConfig, folder: Path, devices: Sequence[str]) -> DecodeTimes:
    """Return the measured decodes of ``model``, a checkpoint in ``folder``, on such devices of torch's."""
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
    """Return the measured steps of ``model``, a checkpoint in ``folder``, on such ranks.

    With ``estimates`` the file differs, since it holds corrections relative to them.
    """
    facts = {
        "devices": [info.device_name for info in infos],
        **model_facts(model, folder),
        "denoiser": {name: repr(getattr(model.denoiser, name)) for name in TIMED},
        **software_facts(),
        **({"estimates": "of the cost model"} if estimates else {}),
    }
    return StepTimes(file_about(Settings().data_dir / "step_times", model.name, facts))


def estimates_s_of(request: MediaRequest, encoded: Shapes, estimates: StepEstimates | None) -> dict[int, float]:
    """Return the estimated seconds of a step by team size, up to a factor that all steps of the model share.

    Without ``estimates`` of the cost model, the number of tokens decides, on one rank.
    """
    frames = 1 + (request.num_frames - 1) / FRAMES_PER_TOKEN + request.num_layers  # and the whole picture
    num_tokens = frames * request.width * request.height / PIXELS_PER_TOKEN + num_text_tokens(encoded)
    num_branches = 2 if request.true_cfg_scale > 1 else 1
    return estimates.step_s(num_tokens, num_branches) if estimates else {1: rough_step_s(num_tokens, num_branches)}


def num_text_tokens(encoded: Shapes) -> int:
    """Return the length of the longest sequence among what was encoded."""
    return max((shape[1] for _, shape in encoded if len(shape) == 3), default=0)
