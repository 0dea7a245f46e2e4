"""What few-bit linears change in the latents of published models, at full size with random weights, after all steps.

    python -m benchmarks.model_step.precisions [MODEL ...] [--precisions native fp8 int8] [--steps N]

For each precision a model with the same weights takes the same noise and prompt through its solver: the relative error
of the first step's predictions and of the finished latents, and the PSNR of these (their peak is the range of the
reference's). The reference is ``native``: bfloat16 on a GPU, float32 on a CPU. Random weights tell how errors of
rounding add up over blocks and steps of that architecture. Trained ones have outliers, for which there are pictures
of the shipped models (``benchmarks.precision_quality``). The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.likeness import psnr_db
from benchmarks.model_step.errors import relative_error
from benchmarks.models.published import SEED, PublishedModel
from benchmarks.results import tell
from engines.torch_engine.engine import TorchEngine
from pipelines.blocks.blank import blank_conditioning
from pipelines.blocks.sampler import BlocksSampler
from pipelines.checkpoint import Checkpoint
from pipelines.size import Size

MODELS = ("FLUX.2-klein-4B", "Qwen-Image", "FLUX.2-dev", "Z-Image-Turbo")
REFERENCE = "native"
ALONE = (0,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """What a precision made of one job: ``predictions`` of the first step, and the ``latents`` after ``num_steps``."""

    predictions: tuple[Tensor, ...]
    latents: Tensor
    num_steps: int


@torch.no_grad()
def way_of(model: PublishedModel, precision: str, num_steps: int | None = None) -> Way:
    """``model`` is quantised for good."""
    opened = model.opened
    defaults = Checkpoint.of_configuration(str(opened.path)).defaults
    request = defaults.request(model.size, num_inference_steps=num_steps or defaults.num_inference_steps)
    noise = torch.Generator().manual_seed(SEED)
    sampler = BlocksSampler(opened)
    state = sampler.begin(request, blank_conditioning(opened, request, model.num_tokens, noise))
    engine = TorchEngine(model.denoiser(), strategy="ulysses", precision=precision)
    first: tuple[Tensor, ...] = ()
    for _ in range(sampler.num_steps(state)):
        predictions = engine.predict(sampler.branches(state), ALONE)
        first = first or tuple(x.float().cpu() for x in predictions)
        state = sampler.advance(state, predictions)
    engine.close()
    return Way(predictions=first, latents=sampler.latents(state)["latents"].float(), num_steps=sampler.num_steps(state))


def compared(given: Way, expected: Way) -> dict[str, Any]:
    pairs = zip(given.predictions, expected.predictions, strict=True)
    peak = float(expected.latents.max() - expected.latents.min())
    return {
        "prediction_error": max(relative_error(*pair) for pair in pairs),
        "latents_error": relative_error(given.latents, expected.latents),
        "latents_psnr_db": round(psnr_db(given.latents.numpy(), expected.latents.numpy(), peak), 1),
    }


def results_of(name: str, arguments: Arguments, device: torch.device, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """One for each precision but the reference."""

    def way(precision: str) -> Way:
        gc.collect()  # the model before this one holds itself; there is no memory for two of the largest
        model = PublishedModel.made(name, device, dtype, arguments.size, arguments.tokens)
        return way_of(model, precision, arguments.steps)

    expected = way(REFERENCE)
    for precision in arguments.precisions:
        said = {"model": name, "dtype": str(dtype).removeprefix("torch."), "precision": precision}
        yield {**said, "num_steps": expected.num_steps, **compared(way(precision), expected)}


class Arguments(argparse.Namespace):
    models: tuple[str, ...] = MODELS
    precisions: tuple[str, ...] = ("fp8", "int8")
    size: Size | None = None
    tokens: int | None = None
    steps: int | None = None
    out: Path | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=Arguments.models, help="published, or folders")
    parser.add_argument("--precisions", nargs="+", default=Arguments.precisions)
    parser.add_argument("--size", type=Size.parse, help="of the picture")
    parser.add_argument("--tokens", type=int, help="of the prompt")
    parser.add_argument("--steps", type=int, help="by default the model's own")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(namespace=Arguments())
    on_gpu = torch.cuda.is_available()
    device, dtype = (torch.device("cuda", 0), torch.bfloat16) if on_gpu else (torch.device("cpu"), torch.float32)
    hardware = torch.cuda.get_device_name(device) if on_gpu else "CPU"
    results = (result for name in arguments.models for result in results_of(name, arguments, device, dtype))
    tell({"hardware": hardware, "torch": torch.__version__}, results, arguments.out)


if __name__ == "__main__":
    main()
