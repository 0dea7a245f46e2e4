"""``troupe calibrate``: fixed scales for ``fp8-static`` and ``int8-static``, from steps of real prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from deployments.cli.progress import console

if TYPE_CHECKING:
    import torch

    from engines.core.model import DenoiserModel
    from pipelines.checkpoint import Checkpoint
    from pipelines.pictures import InputPictures
    from pipelines.request import MediaRequest

PROMPTS = (
    "a large red circle in the centre on a white background",
    "a small blue square above a green triangle on a black background",
    "a yellow star moves from left to right on a grey background",
    "a photograph of a lighthouse on a cliff at dusk, long exposure",
    "portrait of an old fisherman in the rain, black and white",
    "a bowl of ripe fruit on a wooden table, oil on canvas",
    "a crowded night market seen from above, neon signs, wet asphalt",
    "the words 'open late' painted on a shop window, reflections of trees",
)
"""What is run without a file of prompts."""


def calibrate(source: str, out: Path, prompts_file: Path | None, size: str | None, dtype_name: str) -> None:
    """Write to ``out`` the largest magnitude that each linear's input has over all steps of the prompts.

    ValueError for a model, a size or a file of prompts that cannot be used.
    """
    from engines.quantization.calibration import recording_all, save_calibration
    from pipelines.checkpoint import Checkpoint

    prompts = read_prompts(prompts_file)
    model, run = model_over(prompts, Checkpoint.open(source, find_device(), dtype_name), size)
    with recording_all(model) as records:
        run()
    save_calibration(records, out)
    console.print(f"{out}  scales of {source} over {len(prompts)} prompts", soft_wrap=True)


def model_over(
    prompts: Sequence[str], checkpoint: Checkpoint, size: str | None
) -> tuple[DenoiserModel, Callable[[], None]]:
    """A model, and what takes it through all steps of the prompts, unsplit, in ``size`` or the model's own.

    Where it must have pictures beside a prompt, they are noise.
    """
    from rich.progress import track

    from pipelines.run import PlainEngine, load_pipeline
    from pipelines.size import Size

    wanted = Size.parse(size) if size else None
    unguided = partial(checkpoint.defaults.request, wanted, true_cfg_scale=1.0)
    requests = [unguided(prompt=prompt, seed=seed) for seed, prompt in enumerate(prompts)]
    pictures = noisy_pictures(requests[0])
    model = checkpoint.denoiser()
    pipeline = load_pipeline(checkpoint, PlainEngine(model=model))

    def run() -> None:
        for request in track(requests, "Calibrating", console=console, transient=True):
            pipeline.denoise(request, pictures)

    return model, run


def noisy_pictures(request: MediaRequest) -> InputPictures:
    """As many as come along with ``request``, in its size; the same at every call."""
    from numpy.random import default_rng

    from pipelines.pictures import InputPicture, InputPictures

    draw, (width, height) = default_rng(0), (request.width, request.height)
    pictures = (
        InputPicture(width=width, height=height, mode="RGB", data=draw.bytes(3 * width * height))
        for _ in range(request.num_pictures)
    )
    return InputPictures(pictures=tuple(pictures))


def read_prompts(file: Path | None) -> tuple[str, ...]:
    """One a line. ValueError for a file without any."""
    if file is None:
        return PROMPTS
    prompts = tuple(line.strip() for line in file.read_text().splitlines() if line.strip())
    if not prompts:
        raise ValueError(f"{file} holds no prompt: write one a line")
    return prompts


def find_device() -> torch.device:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
