"""Pictures for a report: `python -m pipelines.training.pictures --losses NAME=loss.json --curve OUT --sheet OUT`."""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from diffusers import FluxPipeline, WanPipeline
from numpy.typing import NDArray
from PIL import Image

from pipelines.training.evaluate import (
    CHECKPOINTS,
    held_out_motion_prompts,
    held_out_prompts,
    paint_stills,
    paint_videos,
)

NUM_STILLS, NUM_VIDEOS, FRAMES = 16, 8, (0, 2, 4, 6, 8, 10, 12, 14, 16)


def loss_curves(logs: dict[str, Path], out: Path) -> None:
    """Losses over training steps, logarithmic."""
    import matplotlib.pyplot as plt  # only reports need it

    figure, axes = plt.subplots(figsize=(7, 4), dpi=80)
    for name, path in logs.items():
        points = json.loads(path.read_text())
        axes.plot([p["step"] for p in points], [p["loss"] for p in points], label=name, linewidth=1)
    axes.set(xlabel="step", ylabel="loss (mean of 50 steps)", yscale="log")
    axes.legend()
    figure.tight_layout()
    figure.savefig(out)


def _rows(tiles: NDArray[np.uint8], columns: int) -> NDArray[np.uint8]:
    count, height, width, _ = tiles.shape
    grid = tiles.reshape(count // columns, columns, height, width, 3).swapaxes(1, 2)
    return grid.reshape(count // columns * height, columns * width, 3)


def contact_sheet(args: argparse.Namespace) -> None:
    """Held-out prompts: stills in two rows, then one row of frames for each video."""
    flux = FluxPipeline.from_pretrained(CHECKPOINTS / "flux-shapes", torch_dtype=torch.float32)
    wan = WanPipeline.from_pretrained(CHECKPOINTS / "wan-shapes", torch_dtype=torch.float32)
    stills = [text for _, text in held_out_prompts(NUM_STILLS, args.seed)]
    motions = [text for _, text in held_out_motion_prompts(NUM_VIDEOS, args.seed)]
    print("\n".join([*stills, *motions]))
    top = _rows(np.stack(paint_stills(flux, stills, args, args.seed)), NUM_STILLS // 2)
    videos = np.stack(paint_videos(wan, motions, args, args.seed))[:, FRAMES]
    below = _rows(videos.reshape(-1, *videos.shape[2:]), len(FRAMES))
    sheet = np.full((len(top) + len(below), max(top.shape[1], below.shape[1]), 3), 255, np.uint8)
    sheet[: len(top), : top.shape[1]] = top
    sheet[len(top) :, : below.shape[1]] = below
    Image.fromarray(sheet).quantize(128).save(args.sheet, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--losses", nargs="*", default=[], metavar="NAME=PATH")
    parser.add_argument("--curve", type=Path)
    parser.add_argument("--sheet", type=Path)
    parser.add_argument("--seed", type=int, default=3)
    args = parser.parse_args()
    args.height, args.width, args.steps, args.guidance = 128, 128, 20, None
    if args.curve:
        loss_curves({name: Path(path) for name, path in (pair.split("=", 1) for pair in args.losses)}, args.curve)
    if args.sheet:
        contact_sheet(args)


if __name__ == "__main__":
    main()
