"""What steps without forwards cost in pictures and clips of the shipped models, and what they save.

    python -m benchmarks.step_cache [--models flux-shapes ...] [--prompts N] [--steps N] [--threads N] [--out FILE]

Held-out prompts are painted by the project's own pipeline in one process with each ``cache``, and without one in as few
steps as "fast" makes forwards: PSNR and SSIM (scikit-image's, the mean over a clip's frames) against all forwards, the
seconds that denoising took, and what the judge finds in them. Seconds are those of the process on its CPU, which other
programs disturb little. The ceiling of a gain is the number of steps over that of forwards. The last line is one JSON
document.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from PIL import Image

from benchmarks.likeness import Pixels, psnr_db, ssim
from benchmarks.results import tell
from benchmarks.spread import Spread
from pipelines.caching import PATTERNS, CacheMode, computed_steps
from pipelines.checkpoint import Checkpoint
from pipelines.request import NO_PICTURES, InputPicture, InputPictures, MediaRequest
from pipelines.run import Pipeline, load_pipeline
from training import evaluate
from training.judge import look_at
from training.kontext_shapes import evaluate as edits

PROMPTS_SEED = 1
NUM_PROMPTS: Mapping[str, int] = {"flux-shapes": 48, "kontext-shapes": 48, "wan-shapes": 24}
Frames = Pixels
"""(frames, height, width, 3)"""
Checks = Mapping[str, bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """``judge`` says what frames show of what was asked for."""

    prompt: str
    judge: Callable[[Frames], Checks]
    pictures: InputPictures = NO_PICTURES


@dataclass(frozen=True, kw_only=True, slots=True)
class Painted:
    frames: Frames
    denoise_s: float


def tasks_of(model: str, num: int) -> list[Task]:
    """The first ``num`` held-out tasks. ValueError for a model that no judge knows."""
    match model:
        case "flux-shapes":
            stills = evaluate.held_out_prompts(num, PROMPTS_SEED)
            return [Task(prompt=text, judge=partial(_judge_still, scene)) for scene, text in stills]
        case "wan-shapes":
            clips = evaluate.held_out_motion_prompts(num, PROMPTS_SEED)
            return [Task(prompt=text, judge=partial(_judge_motion, scene)) for scene, text in clips]
        case "kontext-shapes":
            size = Checkpoint.open(model).defaults
            tasks = edits.held_out_tasks(num, PROMPTS_SEED, height=size.height, width=size.width)
            return [
                Task(prompt=task.said.text, judge=partial(_judge_edit, task), pictures=_picture_of(task.before))
                for task in tasks
            ]
    raise ValueError(f"no judge knows {model}; known: {', '.join(NUM_PROMPTS)}")


def _judge_still(scene: Any, frames: Frames) -> Checks:
    return evaluate.check_still(scene, look_at(frames[0]))


def _judge_motion(scene: Any, frames: Frames) -> Checks:
    return evaluate.check_motion(scene, [look_at(frame) for frame in frames])


def _judge_edit(task: Any, frames: Frames) -> Checks:
    return edits.judged(task, frames[0])


def _picture_of(pixels: Pixels) -> InputPictures:
    return InputPictures(pictures=(InputPicture.of(Image.fromarray(pixels)),))


def painted(pipeline: Pipeline, request: MediaRequest, pictures: InputPictures) -> Painted:
    sampler = pipeline.sampler
    state = sampler.begin(request, pipeline.text_encoder.encode(request, pictures))
    start_s = time.process_time()
    for _ in range(sampler.num_steps(state)):
        branches = sampler.branches(state)
        state = sampler.advance(state, pipeline.engine.predict(branches, (0,)) if branches else ())
    denoise_s = time.process_time() - start_s
    return Painted(frames=pipeline.decoder.decode(sampler.latents(state), request), denoise_s=denoise_s)


def settings_of(num_steps: int) -> dict[str, tuple[CacheMode, int]]:
    """By their names: the cache and the number of steps."""
    few = sum(computed_steps("fast", num_steps))
    modes: dict[str, tuple[CacheMode, int]] = {mode: (mode, num_steps) for mode in ("off", *PATTERNS)}
    return {**modes, f"off, {few} steps": ("off", few)}


def results_of(model: str, num_prompts: int, num_steps: int | None) -> Iterator[dict[str, Any]]:
    checkpoint = Checkpoint.open(model)
    pipeline, tasks = load_pipeline(checkpoint), tasks_of(model, num_prompts)
    steps = num_steps or checkpoint.defaults.num_inference_steps
    requests = [
        checkpoint.defaults.request(prompt=task.prompt, seed=seed, num_pictures=len(task.pictures.pictures))
        for seed, task in enumerate(tasks)
    ]
    painted(pipeline, requests[0], tasks[0].pictures)
    settings = settings_of(steps)
    by_setting: dict[str, list[Painted]] = {name: [] for name in settings}
    for request, task in zip(requests, tasks, strict=True):  # in turns: what else the machine does hits all alike
        for name, (cache, num) in settings.items():
            asked = replace(request, cache=cache, num_inference_steps=num)
            by_setting[name].append(painted(pipeline, asked, task.pictures))
    for name, (cache, num) in settings.items():
        num_forwards = sum(computed_steps(cache, num))
        said = {"model": model, "cache": name, "num_steps": num, "num_forwards": num_forwards}
        ceiling = round(steps / num_forwards, 2)
        yield {**said, "ceiling": ceiling, **measured(tasks, by_setting[name], by_setting["off"])}


def measured(tasks: Sequence[Task], given: Sequence[Painted], expected: Sequence[Painted]) -> dict[str, Any]:
    scored = [(task.prompt, dict(task.judge(one.frames))) for task, one in zip(tasks, given, strict=True)]
    shares = {check: score["share"] for check, score in evaluate.summary(scored).items() if "(" not in check}
    pairs = [(one.frames, other.frames) for one, other in zip(given, expected, strict=True)]
    differences, likenesses = ([measure(*pair) for pair in pairs] for measure in (psnr_db, ssim))
    gains = [other.denoise_s / one.denoise_s for one, other in zip(given, expected, strict=True)]
    return {
        "denoise_s": Spread.of([one.denoise_s for one in given]).rounded(),
        "gain": Spread.of(gains).rounded(2),
        "psnr_db": {"mean": round(mean(differences), 2), **Spread.of(differences).rounded(2)},
        "ssim": {"mean": round(mean(likenesses), 4), **Spread.of(likenesses).rounded(4)},
        "shares": shares,
    }


class Arguments(argparse.Namespace):
    models: tuple[str, ...]
    prompts: int | None
    steps: int | None
    threads: int
    out: Path | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=tuple(NUM_PROMPTS), choices=tuple(NUM_PROMPTS))
    parser.add_argument("--prompts", type=int)
    parser.add_argument("--steps", type=int, help="of the uncached; by default the model's")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(namespace=Arguments())
    torch.set_num_threads(arguments.threads)
    results = (
        result
        for model in arguments.models
        for result in results_of(model, arguments.prompts or NUM_PROMPTS[model], arguments.steps)
    )
    tell({"torch": torch.__version__, "threads": arguments.threads}, results, arguments.out)


if __name__ == "__main__":
    main()
