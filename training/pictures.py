"""Pictures for a report: `python -m training.pictures --losses NAME=loss.json --curve OUT --sheet OUT`."""

import argparse
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from training.evaluate import (
    WORDINGS,
    held_out_motion_prompts,
    held_out_prompts,
    load,
    paint_stills,
    paint_videos,
)

NUM_STILLS, NUM_VIDEOS, FRAMES = 16, 8, (0, 2, 4, 6, 8, 10, 12, 14, 16)


def loss_curves(logs: dict[str, Path], out: Path) -> None:
    """Draw losses over training steps, logarithmically, and write the picture to `out`."""
    import matplotlib.pyplot as plt  # only reports need it

    figure, axes = plt.subplots(figsize=(8, 5), dpi=80)
    for name, path in logs.items():
        points = json.loads(path.read_text())
        for key, label, style in (("loss", name, "-"), ("loss 2", f"{name}: reading", ":")):
            logged = [p for p in points if key in p]
            if any(p[key] for p in logged):
                axes.plot([p["step"] for p in logged], [p[key] for p in logged], style, label=label, linewidth=1)
    axes.set(xlabel="step", ylabel="loss (mean of 50 steps)", yscale="log")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out)


def _rows(tiles: NDArray[np.uint8], columns: int) -> NDArray[np.uint8]:
    count, height, width, _ = tiles.shape
    grid = tiles.reshape(count // columns, columns, height, width, 3).swapaxes(1, 2)
    return grid.reshape(count // columns * height, columns * width, 3)


def contact_sheet(args: argparse.Namespace) -> None:
    """Paint held-out prompts on one sheet: stills in two rows, then one row of frames for each video."""
    flux, wan = load("flux-shapes"), load("wan-shapes")
    stills = [text for _, text in held_out_prompts(NUM_STILLS, args.seed, args.wording)]
    motions = [text for _, text in held_out_motion_prompts(NUM_VIDEOS, args.seed, args.wording)]
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
    parser.add_argument("--wording", choices=tuple(WORDINGS), default="plain")
    parser.add_argument("--seed", type=int, default=3)
    args = parser.parse_args()
    if args.curve:
        loss_curves({name: Path(path) for name, path in (pair.split("=", 1) for pair in args.losses)}, args.curve)
    if args.sheet:
        contact_sheet(args)


if __name__ == "__main__":
    main()
