"""Scores a shipped model on held-out prompts: `python -m training.evaluate --model flux-shapes`.

Pictures come from diffusers' own pipeline class, with the settings of the shipped `troupe.json` unless others are
given; `judge` decides what they show. The last line is one JSON object.
"""

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import skimage.metrics
import torch
from diffusers import FluxPipeline, WanPipeline

from pipelines.checkpoint import Checkpoint
from training import judge
from training.judge import Picture, SeenShape, look_at, motion_of, place_of
from training.shapes.captions import CaptionParts, caption, motion_caption
from training.shapes.scenes import PLACES, Item, MotionScene, Scene, held_out_motion_scene, held_out_scene
from training.shapes.tokens import MAX_LENGTH
from training.shapes.wording.phrases import NEW, NEWER, SHOWN, free_caption, free_motion_caption
from training.wan_shapes.model import NUM_FRAMES

CHECKPOINTS = Path(__file__).parents[1] / "pipelines" / "checkpoints"
WORDINGS = {  # no training caption has templates of the last two; training was widened by which of "unseen" had failed
    "plain": None,
    "free": SHOWN,
    "unseen": NEW,
    "fresh": NEWER,
}
SETTINGS = ("model", "prompts", "height", "width", "steps", "guidance", "device", "dtype", "seed")
EVERYTHING = CaptionParts(size=True, place=True, background=True)
Checks = dict[str, bool]


def held_out_prompts(count: int, seed: int, wording: str = "plain") -> list[tuple[Scene, str]]:
    """Return still scenes that training never showed, with captions that say everything, in one of `WORDINGS`."""
    rng, words = random.Random(seed), WORDINGS[wording]
    scenes = [held_out_scene(rng) for _ in range(count)]
    say = partial(free_caption, wording=words) if words else caption
    return [(scene, say(scene, rng, EVERYTHING)) for scene in scenes]


def held_out_motion_prompts(count: int, seed: int, wording: str = "plain") -> list[tuple[MotionScene, str]]:
    """Return video scenes that training never showed, with captions that say everything, in one of `WORDINGS`."""
    rng, words = random.Random(seed), WORDINGS[wording]
    scenes = [held_out_motion_scene(rng) for _ in range(count)]
    say = partial(free_motion_caption, wording=words) if words else motion_caption
    return [(scene, say(scene, rng, EVERYTHING)) for scene in scenes]


def _looks_like(item: Item, seen: SeenShape) -> bool:
    return (item.shape, item.colour) == (seen.shape, seen.colour)


def _match(items: tuple[Item, ...], picture: Picture) -> list[SeenShape] | None:
    """Return the detected shape of each item, or None unless shapes and colours are exactly the requested ones."""
    if len(picture.shapes) != len(items):
        return None
    for order in (picture.shapes, picture.shapes[::-1]):
        if all(_looks_like(item, seen) for item, seen in zip(items, order, strict=True)):
            return list(order)
    return None


def _right_place(scene: Scene, shapes: list[SeenShape]) -> bool:
    if scene.relation is None:
        return all(place_of(s) == PLACES[i.place or "centre"] for i, s in zip(scene.items, shapes, strict=True))
    first, second = shapes
    dx, dy = second.x - first.x, second.y - first.y
    ahead, aside = (dy, dx) if scene.relation == "above" else (dx, dy)
    return ahead > 0.15 and ahead > abs(aside)


def check_still(scene: Scene, picture: Picture) -> Checks:
    """Return which parts of a still scene the picture shows. A place counts only if shape and colour are right too."""
    shapes = _match(scene.items, picture)
    sized = shapes is not None and all(
        item.size in ("medium", judge.size_of(seen)) for item, seen in zip(scene.items, shapes, strict=True)
    )
    kind = "one" if len(scene.items) == 1 else "pair" if scene.relation else "two places"
    checks = {
        "shape and colour": shapes is not None,
        "place": shapes is not None and _right_place(scene, shapes),
        "size": sized,
        "background": picture.background == scene.background,
    }
    return checks | {
        f"{name} ({kind})": value for name, value in checks.items() if name in ("shape and colour", "place")
    }


def check_motion(scene: MotionScene, frames: list[Picture]) -> Checks:
    """Return which parts of a video scene the frames show: shape and colour if at least 3 frames of 4 do."""
    right = [len(frame.shapes) == 1 and _looks_like(scene.item, frame.shapes[0]) for frame in frames]
    motion = motion_of(frames) == scene.motion
    grounds = Counter(frame.background for frame in frames)
    return {
        "shape and colour": sum(right) >= 0.75 * len(right),
        "motion": motion,
        f"motion ({scene.motion})": motion,
        "background": grounds.most_common(1)[0][0] == scene.background,
    }


def with_shipped_settings(args: argparse.Namespace, model: str) -> argparse.Namespace:
    """Return `args` with the shipped model's `height`, `width`, `steps` and `guidance` where they leave these open."""
    path = CHECKPOINTS / model
    shipped = Checkpoint(path).defaults
    guidance = shipped.guidance_scale if shipped.kind == "image" else shipped.true_cfg_scale
    settings = {
        "height": shipped.height,
        "width": shipped.width,
        "steps": shipped.num_inference_steps,
        "guidance": guidance,
        "tokens": MAX_LENGTH,
    }
    overrides = {name: value for name, value in vars(args).items() if value is not None}
    return argparse.Namespace(**(vars(args) | settings | overrides))


def _generators(start: int, count: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(start + index) for index in range(count)]


def paint_stills(pipeline: Any, prompts: list[str], args: argparse.Namespace, seed: int) -> list[judge.Pixels]:
    """Return one picture (height, width, 3) a prompt."""
    args = with_shipped_settings(args, "flux-shapes")
    images = pipeline(
        prompts,
        height=args.height,
        width=args.width,
        num_inference_steps=args.steps,
        guidance_scale=args.guidance,
        max_sequence_length=args.tokens,
        generator=_generators(seed, len(prompts)),
        output_type="np",
    ).images
    return [(image * 255).round().astype(np.uint8) for image in images]


def paint_videos(pipeline: Any, prompts: list[str], args: argparse.Namespace, seed: int) -> list[judge.Pixels]:
    """Return one video (frames, height, width, 3) a prompt."""
    args = with_shipped_settings(args, "wan-shapes")
    videos = pipeline(
        prompts,
        height=args.height,
        width=args.width,
        num_frames=NUM_FRAMES,
        num_inference_steps=args.steps,
        guidance_scale=args.guidance,
        max_sequence_length=args.tokens,
        generator=_generators(seed, len(prompts)),
        output_type="np",
    ).frames
    return [(video * 255).round().astype(np.uint8) for video in videos]


def likeness(pipeline: Any, args: argparse.Namespace, wording: str) -> dict[str, float]:
    """Return SSIM (Wang et al., 2004; mean, lowest) and PSNR (median) of stills to those of the same seeds that the
    model paints with its own steps and without the adapter."""
    prompts = [text for _, text in held_out_prompts(args.prompts, args.seed, wording)]
    given = _paint(pipeline, prompts, args)
    own = argparse.Namespace(**vars(args) | {"steps": None, "guidance": None})
    if args.adapter:
        pipeline.disable_lora()
    expected = _paint(pipeline, prompts, own)
    if args.adapter:
        pipeline.enable_lora()
    metrics: Any = skimage.metrics  # its functions have no types
    pairs = list(zip(given, expected, strict=True))
    ssim = [metrics.structural_similarity(one, other, channel_axis=-1) for one, other in pairs]
    psnr_db = np.median([metrics.peak_signal_noise_ratio(other, one) for one, other in pairs])
    return {
        "ssim": round(float(np.mean(ssim)), 4),
        "lowest_ssim": round(float(min(ssim)), 4),
        "psnr_db": round(float(psnr_db), 2),
    }


def _batches(prompts: list[Any], size: int) -> list[list[Any]]:
    return [prompts[start : start + size] for start in range(0, len(prompts), size)]


def _paint(pipeline: Any, prompts: list[str], args: argparse.Namespace) -> list[judge.Pixels]:
    paint = paint_stills if args.model == "flux-shapes" else paint_videos
    batches = enumerate(_batches(prompts, args.batch))
    return [one for number, batch in batches for one in paint(pipeline, batch, args, number * args.batch)]


def _score_stills(pipeline: Any, args: argparse.Namespace, wording: str) -> list[tuple[str, Checks]]:
    prompts = held_out_prompts(args.prompts, args.seed, wording)
    images = _paint(pipeline, [text for _, text in prompts], args)
    return [(text, check_still(scene, look_at(image))) for (scene, text), image in zip(prompts, images, strict=True)]


def _score_videos(pipeline: Any, args: argparse.Namespace, wording: str) -> list[tuple[str, Checks]]:
    prompts = held_out_motion_prompts(args.prompts, args.seed, wording)
    videos = _paint(pipeline, [text for _, text in prompts], args)
    return [
        (text, check_motion(scene, [look_at(frame) for frame in video]))
        for (scene, text), video in zip(prompts, videos, strict=True)
    ]


def summary(scored: list[tuple[str, Checks]]) -> dict[str, dict[str, float]]:
    """Return for each check the share of prompts that passed, and the number of prompts that it applies to."""
    names = {name: None for _, checks in scored for name in checks}
    results = {name: [checks[name] for _, checks in scored if name in checks] for name in names}
    return {name: {"share": round(sum(r) / len(r), 4), "prompts": len(r)} for name, r in results.items()}


def load(
    model: str, checkpoint: Path | None = None, dtype: torch.dtype = torch.float32, adapter: Path | None = None
) -> Any:
    """Return diffusers' own pipeline of a model, the shipped one unless another checkpoint is given, perhaps with a
    LoRA adapter."""
    pipeline: Any = FluxPipeline if model == "flux-shapes" else WanPipeline
    pipeline = pipeline.from_pretrained(checkpoint or CHECKPOINTS / model, torch_dtype=dtype)
    pipeline.set_progress_bar_config(disable=True)
    if adapter:
        pipeline.load_lora_weights(adapter.parent, weight_name=adapter.name)
    return pipeline


def _score(pipeline: Any, args: argparse.Namespace, wording: str) -> list[tuple[str, Checks]]:
    """Return each prompt and what its picture shows, with "all" of it as one more check."""
    scored = (_score_stills if args.model == "flux-shapes" else _score_videos)(pipeline, args, wording)
    scored = [(text, {"all": all(checks.values())} | checks) for text, checks in scored]
    for text, checks in scored:
        wrong = [name for name, passed in checks.items() if not passed and name != "all" and "(" not in name]
        if wrong and args.verbose:
            print(f"{', '.join(wrong)}: {text}")
    return scored


def evaluate(args: argparse.Namespace) -> dict[str, Any]:
    """Paint and judge the held-out prompts, print the failed ones if asked to, and return settings and shares:
    those of the first wording and length as "checks", and of each further one under its name."""
    args = with_shipped_settings(args, args.model)
    pipeline = load(args.model, args.checkpoint, getattr(torch, args.dtype), args.adapter).to(args.device)
    start_s, names = time.monotonic(), iter(["checks"])
    shares: dict[str, dict[str, Any]] = {}
    for wording, tokens in product(args.wordings, args.lengths):
        name = next(names, f"checks ({wording} wording, {tokens} tokens)")
        shares[name] = summary(_score(pipeline, argparse.Namespace(**vars(args) | {"tokens": tokens}), wording))
    if args.likeness:
        shares["likeness"] = likeness(pipeline, args, args.wordings[0])
    settings = {name: getattr(args, name) for name in SETTINGS}
    return {**settings, "wall_s": round(time.monotonic() - start_s, 1), **shares}


def options_of(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options in `words`, by default those of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("flux-shapes", "wan-shapes"), required=True)
    parser.add_argument("--checkpoint", type=Path, help="default: the shipped one")
    parser.add_argument("--adapter", type=Path, help="file of a LoRA adapter")
    parser.add_argument("--likeness", action="store_true", help="of stills to those of the model's own steps, too")
    parser.add_argument("--prompts", type=int, default=240)
    parser.add_argument("--batch", type=int, default=24)
    for name, kind in (("--height", int), ("--width", int), ("--steps", int), ("--guidance", float)):
        parser.add_argument(name, type=kind, help="default: the shipped model's")
    parser.add_argument("--wordings", nargs="+", choices=tuple(WORDINGS), default=["plain"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[MAX_LENGTH], help="of prompts, in tokens")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--verbose", action="store_true", help="print the prompts that failed")
    return parser.parse_args(words)


def main() -> None:
    print(json.dumps(evaluate(options_of())))


if __name__ == "__main__":
    main()
