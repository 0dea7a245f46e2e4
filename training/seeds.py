"""Shows that a seed decides the picture: `python -m training.seeds --model flux-shapes`.

Paints held-out prompts with several seeds each. For every prompt it prints how far apart the pictures are (mean
absolute difference of two, of 255; the closest pair and the mean of all pairs), and how many of them are right.
"""

import argparse
import json
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from training import judge
from training.evaluate import (
    check_motion,
    check_still,
    held_out_motion_prompts,
    held_out_prompts,
    load,
    paint_stills,
    paint_videos,
)


def distances(pictures: list[judge.Pixels]) -> NDArray[np.float64]:
    """Return the mean absolute difference of every two pictures or videos, of 255."""
    pairs = combinations([picture.astype(np.float64) for picture in pictures], 2)
    return np.array([np.abs(first - second).mean() for first, second in pairs])


def _paint(pipeline: Any, scene: Any, prompt: str, args: argparse.Namespace) -> tuple[list[judge.Pixels], int]:
    """Return the pictures of all seeds, and how many of them are right."""
    if args.model == "flux-shapes":
        pictures = paint_stills(pipeline, [prompt] * args.seeds, args, args.seed)
        return pictures, sum(check_still(scene, judge.look_at(picture))["place"] for picture in pictures)
    videos = paint_videos(pipeline, [prompt] * args.seeds, args, args.seed)
    checks = [check_motion(scene, [judge.look_at(frame) for frame in video]) for video in videos]
    return videos, sum(check["motion"] and check["shape and colour"] for check in checks)


def spread(pipeline: Any, scene: Any, prompt: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return one prompt's closest and mean distance, and the share of seeds that gave what it asks for."""
    pictures, right = _paint(pipeline, scene, prompt, args)
    apart = distances(pictures)
    return {
        "prompt": prompt,
        "closest": round(float(apart.min()), 2),
        "mean": round(float(apart.mean()), 2),
        "right": f"{right} of {len(pictures)}",
    }


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the `spread` of each held-out prompt."""
    prompts = held_out_prompts if args.model == "flux-shapes" else held_out_motion_prompts
    pipeline = load(args.model)
    return [spread(pipeline, scene, text, args) for scene, text in prompts(args.prompts, args.seed)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("flux-shapes", "wan-shapes"), required=True)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--seed", type=int, default=5)
    args = parser.parse_args()
    rows = measure(args)
    print("\n".join(f"{row['closest']:6} {row['mean']:6} {row['right']}  {row['prompt']}" for row in rows))
    print(json.dumps({"model": args.model, "seeds": args.seeds, "prompts": rows}))


if __name__ == "__main__":
    main()
