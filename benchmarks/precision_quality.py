"""What precisions and teams cost in pictures and clips of the shipped models.

    python -m benchmarks.precision_quality [--model wan-shapes] [--prompts N] [--out FILE]       precisions, one device
    torchrun --nproc_per_node 4 -m benchmarks.precision_quality [...]                            teams, four GPUs

Precisions: held-out prompts painted by diffusers' pipeline in bfloat16 (float32 on a CPU), and with float8 and int8
linears (scales measured, or fixed by a calibration on other prompts); PSNR against the unquantised, and what the judge
finds in them. Teams: the engine's pictures on 1, 2 and 4 ranks; PSNR against one rank, beside that of one rank against
float32. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.distributed import start_distributed
from benchmarks.likeness import Pixels, psnr_db
from benchmarks.timing import rank_synchronize
from engines.core.model import Branch
from engines.core.shard_plan import ShardPlan
from engines.core.spec import Scheme, tiling_sizes
from engines.quantization.calibration import recording
from engines.quantization.linear import swap_linears
from engines.torch_engine.engine import TorchEngine
from pipelines.checkpoint import Checkpoint
from pipelines.run import load_pipeline
from training import evaluate
from training.judge import look_at

STILLS, CLIPS = "flux-shapes", "wan-shapes"
NUM_PROMPTS = {STILLS: 240, CLIPS: 96}
BATCH = {STILLS: 24, CLIPS: 8}
CALIBRATION_SEED, JUDGED_SEED, NUM_CALIBRATION, NUM_TEAM_PROMPTS = 5, 1, 24, 12
STRATEGIES = ("ulysses", "allgather_kv", "ring")
ALIKE_DB = 40.0
Prompts = list[tuple[Any, str]]
PRECISIONS: tuple[tuple[str, Scheme, bool], ...] = (
    ("fp8", "fp8", False),
    ("fp8-static", "fp8", True),
    ("int8", "int8", False),
)


def compared(given: list[Pixels], expected: list[Pixels]) -> dict[str, float]:
    """PSNR over the pictures: mean, median, lowest, and the share that reaches ``ALIKE_DB``."""
    differences = [psnr_db(one, other) for one, other in zip(given, expected, strict=True)]
    values = {"mean": mean(differences), "median": median(differences), "lowest": min(differences)}
    values["alike"] = mean(difference >= ALIKE_DB for difference in differences)
    return {name: round(value, 2) for name, value in values.items()}


def prompts_of(model: str, num: int, seed: int) -> Prompts:
    """Scenes and the captions that ask for them."""
    return evaluate.held_out_prompts(num, seed) if model == STILLS else evaluate.held_out_motion_prompts(num, seed)


def painted(pipeline: Any, model: str, prompts: Prompts, seed: int) -> list[Pixels]:
    settings = argparse.Namespace(height=None, width=None, steps=None, guidance=None)
    paint = evaluate.paint_stills if model == STILLS else evaluate.paint_videos
    texts = [text for _, text in prompts]
    pictures: list[Pixels] = []
    for start in range(0, len(texts), BATCH[model]):
        pictures += paint(pipeline, texts[start : start + BATCH[model]], settings, seed + start)
    return pictures


def shares(model: str, prompts: Prompts, pictures: list[Pixels]) -> dict[str, float]:
    """Of the prompts, by what was asked for: those whose picture shows it."""
    scored = [
        (
            text,
            evaluate.check_still(scene, look_at(pixels))
            if model == STILLS
            else evaluate.check_motion(scene, [look_at(frame) for frame in pixels]),
        )
        for (scene, text), pixels in zip(prompts, pictures, strict=True)
    ]
    return {check: score["share"] for check, score in evaluate.summary(scored).items() if "(" not in check}


def precisions(model: str, num_prompts: int, device: torch.device, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    prompts = prompts_of(model, num_prompts, JUDGED_SEED)
    others = prompts_of(model, min(NUM_CALIBRATION, num_prompts), CALIBRATION_SEED)
    plan = plan_of(model)
    pipeline = evaluate.load(model, dtype=dtype).to(device)
    with recording(pipeline.transformer, plan) as amax:
        painted(pipeline, model, others, 1000)
    expected = painted(pipeline, model, prompts, 0)
    yield {"precision": str(dtype).removeprefix("torch."), "shares": shares(model, prompts, expected)}
    for name, scheme, fixed in PRECISIONS:
        pipeline = evaluate.load(model, dtype=dtype).to(device)
        swap_linears(pipeline.transformer, plan, scheme, amax if fixed else None)
        pictures = painted(pipeline, model, prompts, 0)
        found = shares(model, prompts, pictures)
        yield {"precision": name, "psnr_db": compared(pictures, expected), "shares": found}


def plan_of(model: str) -> ShardPlan:
    checkpoint = Checkpoint.open(model, "meta")
    with checkpoint.device:
        return checkpoint.outline().plan


class TeamEngine:
    """An ``Engine`` that runs everything on the caller's team of one size."""

    def __init__(self, engine: TorchEngine, num_ranks: int) -> None:
        first = dist.get_rank() // num_ranks * num_ranks
        self._engine, self._ranks = engine, tuple(range(first, first + num_ranks))

    def predict(self, branches: tuple[Branch, ...], ranks: tuple[int, ...] = (0,)) -> tuple[Tensor, ...]:
        return self._engine.predict(branches, self._ranks)

    def warm_up(self, branches: tuple[Branch, ...], ranks: tuple[int, ...] = (0,)) -> None:
        self._engine.warm_up(branches, self._ranks)

    @property
    def was_warm(self) -> bool:
        return self._engine.was_warm

    @property
    def team_sizes(self) -> tuple[int, ...]:
        return (len(self._ranks),)

    def close(self) -> None:
        """The engine serves other teams."""


def teams(model: str, num_prompts: int, device: torch.device, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    prompts = prompts_of(model, num_prompts, JUDGED_SEED)
    (exact,) = engine_pictures(model, prompts, device, torch.float32, STRATEGIES[0], (1,)).values()
    one: list[Pixels] = []
    for strategy in STRATEGIES:
        sizes = tiling_sizes(dist.get_world_size())
        made = engine_pictures(model, prompts, device, dtype, strategy, sizes[1:] if one else sizes)
        if 1 in made:
            one = made.pop(1)
            yield {"num_ranks": 1, "against": "float32", "psnr_db": compared(one, exact)}
        for num_ranks, pictures in made.items():
            found = {"psnr_db": compared(pictures, one), "psnr_db_against_float32": compared(pictures, exact)}
            yield {"strategy": strategy, "num_ranks": num_ranks, "against": "one rank", **found}


def engine_pictures(
    model: str, prompts: Prompts, device: torch.device, dtype: torch.dtype, strategy: str, sizes: tuple[int, ...]
) -> dict[int, list[Pixels]]:
    """By size of team; one engine paints them all."""
    checkpoint = Checkpoint.open(model, device, dtype)
    engine = TorchEngine(checkpoint.denoiser(), strategy=strategy, compiled=False)
    requests = [checkpoint.defaults.request(prompt=text, seed=seed) for seed, (_, text) in enumerate(prompts)]
    pictures = {}
    for num_ranks in sizes:
        team: Any = TeamEngine(engine, num_ranks)
        pipeline = load_pipeline(checkpoint, team)
        pictures[num_ranks] = [pipeline.run(request) for request in requests]
    engine.close()
    return pictures


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=(STILLS, CLIPS), default=STILLS)
    parser.add_argument("--prompts", type=int)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rank, world = start_distributed()
    on_gpu = torch.cuda.is_available()
    device, dtype = (torch.device("cuda", rank), torch.bfloat16) if on_gpu else (torch.device("cpu"), torch.float32)
    num = arguments.prompts or (NUM_PROMPTS[arguments.model] if world == 1 else NUM_TEAM_PROMPTS)
    compare = precisions if world == 1 else teams
    document: dict[str, Any] = {"model": arguments.model, "num_prompts": num, "results": []}
    for result in compare(arguments.model, num, device, dtype):
        document["results"].append(result)
        if rank == 0:
            print(json.dumps(result), flush=True)
        if rank == 0 and arguments.out:  # after each: a later one may hang
            arguments.out.write_text(json.dumps(document))
    if rank == 0:
        print(json.dumps(document), flush=True)
    rank_synchronize()
    os._exit(0)  # graphs hold the communicator: an orderly shutdown would wait for them


if __name__ == "__main__":
    main()
