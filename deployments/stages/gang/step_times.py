"""Where a model's measured times of steps are kept, and what a step is taken to last before there are any."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from deployments.config import ModelConfig
from deployments.settings import Settings
from deployments.stages.gang.facts import model_facts, software_facts
from engines.core.estimates import StepEstimates
from engines.core.storage.files import file_about
from engines.core.transport.parcel import Shapes
from engines.gang.eta.rough import rough_step_s
from engines.gang.eta.step_times import StepTimes
from engines.gang.ranks.rank import RankInfo
from pipelines.request import MediaRequest

FOLDER = "step_times"
PIXELS_PER_TOKEN = 16 * 16
FRAMES_PER_TOKEN = 4
"""As most of this year's transformers see pictures and clips; the first frame counts by itself."""
TIMED = ("engine", "strategy", "precision", "num_ranks", "num_nodes", "threads_per_rank", "torch", "tensorrt", "nccl")
"""Of a denoiser's configuration, what changes how long its steps take."""


def step_times_of(
    model: ModelConfig, folder: Path, infos: Sequence[RankInfo], estimates: StepEstimates | None
) -> StepTimes:
    """Returns what is known of the steps of ``model``, a checkpoint in ``folder``, on such ranks, from a file in the
    data directory.

    Its name has a digest of the machine (the ranks' devices), the model as it is configured, the software, and of
    whether there are ``estimates``, since it holds what measured steps differ by from theirs.
    """
    facts = {
        "devices": [info.device_name for info in infos],
        **model_facts(model, folder),
        "denoiser": {name: repr(getattr(model.denoiser, name)) for name in TIMED},
        **software_facts(),
        **({"estimates": "of the cost model"} if estimates else {}),
    }
    return StepTimes(file_about(Settings().data_dir / FOLDER, model.name, facts))


def estimates_s_of(request: MediaRequest, encoded: Shapes, estimates: StepEstimates | None) -> dict[int, float]:
    """Returns what a step of ``request`` lasts by the size of a team, beside others of its model: as the cost model
    says, or (None) by its tokens alone, on one rank."""
    frames = 1 + (request.num_frames - 1) / FRAMES_PER_TOKEN + request.num_layers  # and what they show together
    num_tokens = frames * request.width * request.height / PIXELS_PER_TOKEN + num_text_tokens(encoded)
    num_branches = 2 if request.true_cfg_scale > 1 else 1
    return estimates.step_s(num_tokens, num_branches) if estimates else {1: rough_step_s(num_tokens, num_branches)}


def num_text_tokens(encoded: Shapes) -> int:
    """Returns the length of the longest sequence among what was encoded."""
    return max(_lengths(shape for _, shape in encoded), default=0)


def _lengths(shapes: Iterable[tuple[int, ...]]) -> Iterable[int]:
    return (shape[1] for shape in shapes if len(shape) == 3)
