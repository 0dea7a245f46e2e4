"""What precisions and widths cost in pictures: the shipped flux-shapes on GPUs.

    python -m benchmarks.precision_quality [--prompts 240] [--out FILE]                 precisions, one GPU
    torchrun --nproc_per_node 4 -m benchmarks.precision_quality [--out FILE]            widths, four GPUs

Precisions: held-out prompts painted by diffusers' pipeline in bfloat16, and with float8 and int8 linears (scales
measured, or fixed by a calibration on other prompts); PSNR against bfloat16's pictures, and what the judge finds in
them. Widths: the same pictures by the engine at widths 1, 2 and 4; PSNR against width 1. The last line is one JSON
document.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.denoise_step import start_distributed
from engines.model import Branch
from engines.parallel.mesh import gang_widths
from engines.torch_engine.calibration import recording
from engines.torch_engine.config import TorchEngineConfig
from engines.torch_engine.engine import TorchEngine
from engines.torch_engine.quantized_linear import Scheme, swap_linears
from pipelines.flux.shard_plan import SHARD_PLAN
from pipelines.loading import resolve_path
from pipelines.registry import load_family
from pipelines.request import MediaRequest
from pipelines.run import load_pipeline
from pipelines.training.evaluate import check_still, held_out_prompts, paint_stills, summary
from pipelines.training.judge import look_at

MODEL, SIDE, BATCH = "flux-shapes", 128, 24
CALIBRATION_SEED, JUDGED_SEED, CALIBRATION_PROMPTS = 5, 1, 24
NUM_WIDTH_PROMPTS = 6
Pixels = NDArray[np.uint8]
Precisions = tuple[tuple[str, Scheme, bool], ...]
PRECISIONS: Precisions = (("fp8", "fp8", False), ("fp8-static", "fp8", True), ("int8", "int8", False))


def psnr_db(given: Pixels, expected: Pixels) -> float:
    error = float(np.mean((given.astype(np.float64) - expected.astype(np.float64)) ** 2))
    return 99.0 if error == 0 else 10 * float(np.log10(255**2 / error))


def diffusers_pipeline() -> Any:
    from diffusers import FluxPipeline

    pipeline = FluxPipeline.from_pretrained(resolve_path(MODEL), torch_dtype=torch.bfloat16).to("cuda")
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def painted(pipeline: Any, prompts: list[str], seed: int) -> list[Pixels]:
    settings = argparse.Namespace(height=SIDE, width=SIDE, steps=20, guidance=None)
    pictures: list[Pixels] = []
    for start in range(0, len(prompts), BATCH):
        pictures += paint_stills(pipeline, prompts[start : start + BATCH], settings, seed + start)
    return pictures


def precisions(num_prompts: int) -> Iterator[dict[str, Any]]:
    prompts = held_out_prompts(num_prompts, JUDGED_SEED)
    texts = [text for _, text in prompts]
    others = [text for _, text in held_out_prompts(CALIBRATION_PROMPTS, CALIBRATION_SEED)]
    pipeline = diffusers_pipeline()
    with recording(pipeline.transformer, SHARD_PLAN) as amax:
        painted(pipeline, others, 1000)
    expected = painted(pipeline, texts, 0)
    for name, scheme, fixed in (("bf16", None, False), *PRECISIONS):
        if scheme is not None:
            pipeline = diffusers_pipeline()
            swap_linears(pipeline.transformer, SHARD_PLAN, scheme, amax if fixed else None)
        pictures = expected if scheme is None else painted(pipeline, texts, 0)
        scores = summary(
            [
                (text, check_still(scene, look_at(pixels)))
                for (scene, text), pixels in zip(prompts, pictures, strict=True)
            ]
        )
        differences = [psnr_db(given, right) for given, right in zip(pictures, expected, strict=True)]
        yield {
            "precision": name,
            "psnr_db": {"mean": round(mean(differences), 2), "lowest": round(min(differences), 2)},
            "shares": {check: score["share"] for check, score in scores.items() if "(" not in check},
        }


class WidthEngine:
    """An ``Engine`` that runs everything on the caller's team of one width."""

    def __init__(self, engine: TorchEngine, width: int) -> None:
        first = dist.get_rank() // width * width
        self._engine, self._ranks = engine, tuple(range(first, first + width))

    def predict(self, branches: tuple[Branch, ...], ranks: tuple[int, ...] = (0,)) -> tuple[Tensor, ...]:
        return self._engine.predict(branches, self._ranks)

    def close(self) -> None:
        """The engine serves other widths."""


def widths(device: torch.device) -> Iterator[dict[str, Any]]:
    path = resolve_path(MODEL)
    model = load_family(path).load_denoiser(path, device, torch.bfloat16)
    pictures: dict[str, list[Pixels]] = {}
    for strategy in ("ulysses", "allgather_kv", "ring"):
        engine = TorchEngine(model, config=TorchEngineConfig(strategy=strategy))
        for width in gang_widths(dist.get_world_size()):
            pipeline = load_pipeline(path, device, torch.bfloat16, WidthEngine(engine, width))
            prompts = held_out_prompts(NUM_WIDTH_PROMPTS, JUDGED_SEED)
            made = [pipeline.run(request_of(text, seed))[0] for seed, (_, text) in enumerate(prompts)]
            one = pictures.setdefault("width 1", made)
            differences = [psnr_db(given, right) for given, right in zip(made, one, strict=True)]
            yield {
                "strategy": strategy,
                "width": width,
                "psnr_db": {"mean": round(mean(differences), 2), "lowest": round(min(differences), 2)},
            }
        engine.close()


def request_of(prompt: str, seed: int) -> MediaRequest:
    defaults = load_family(resolve_path(MODEL)).defaults(resolve_path(MODEL))
    return MediaRequest(
        request_id="quality", model=MODEL, kind="image", prompt=prompt, width=SIDE, height=SIDE,
        num_inference_steps=defaults.num_inference_steps, guidance_scale=defaults.guidance_scale, true_cfg_scale=1.0,
        seed=seed,
    )  # fmt: skip


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=240)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rank, world = start_distributed()
    results = []
    for result in precisions(arguments.prompts) if world == 1 else widths(torch.device("cuda", rank)):
        results.append(result)
        if rank == 0:
            print(json.dumps(result), flush=True)
    if rank == 0:
        document = json.dumps({"model": MODEL, "hardware": torch.cuda.get_device_name(), "results": results})
        if arguments.out:
            arguments.out.write_text(document)
        print(document, flush=True)
    if world > 1:
        dist.barrier()
    os._exit(0)  # graphs hold the communicator: an orderly shutdown would wait for them


if __name__ == "__main__":
    main()
