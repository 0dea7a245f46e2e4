"""Scores an editor on held-out edits: `python -m training.kontext_shapes.evaluate --checkpoint DIR`.

Half of the instructions are in phrasings that training never showed. Pictures come from diffusers' own pipeline class.
The last line is one JSON object.
"""

import argparse
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import FluxKontextPipeline
from PIL import Image

from training.evaluate import CHECKPOINTS, summary
from training.flux_shapes.data import LONG_LENGTH
from training.judge import Pixels, look_at
from training.kontext_shapes.data import draw_pair
from training.kontext_shapes.judge import Judged, check_edit
from training.shapes.boards import board_drawings
from training.shapes.edits import Edit, held_out_edit
from training.shapes.instructions import Instruction, instruction
from training.shapes.phrasings import HELD_OUT, PHRASINGS
from training.shapes.tokens import MAX_LENGTH

MODEL = "kontext-shapes"
SETTINGS = ("prompts", "height", "width", "steps", "guidance", "tokens", "device", "dtype", "seed")
LONG_SHARE = 5  # one edit in five is scored with diffusers' own number of tokens as well
SHEET_COLUMNS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One held-out edit: its words, whether their phrasing is held out too, and pictures (height, width, 3)."""

    edit: Edit
    said: Instruction
    is_new_phrasing: bool
    before: Pixels
    wanted: Pixels


def held_out_tasks(count: int, seed: int, *, height: int, width: int) -> list[Task]:
    """Return edits that training never showed; every second one in a phrasing that training never showed."""
    rng = random.Random(seed)
    edits = [held_out_edit(rng) for _ in range(count)]
    said = [instruction(edit, rng, HELD_OUT if index % 2 else PHRASINGS) for index, edit in enumerate(edits)]
    before, after = board_drawings([edit.before for edit in edits]), board_drawings([edit.after for edit in edits])
    pairs = draw_pair(before, after, (height, width), torch.Generator().manual_seed(seed))
    pixels = ((pairs + 1) * 127.5).round().byte().movedim(2, -1).numpy()
    return [
        Task(edit=edit, said=words, is_new_phrasing=bool(index % 2), before=pair[0], wanted=pair[1])
        for index, (edit, words, pair) in enumerate(zip(edits, said, pixels, strict=True))
    ]


def paint(pipeline: Any, tasks: list[Task], args: argparse.Namespace, seed: int) -> list[Pixels]:
    """Return one edited picture (height, width, 3) a task."""
    images = pipeline(
        image=[Image.fromarray(task.before) for task in tasks],
        prompt=[task.said.text for task in tasks],
        height=args.height,
        width=args.width,
        max_area=args.height * args.width,
        num_inference_steps=args.steps,
        guidance_scale=args.guidance,
        max_sequence_length=args.tokens,
        generator=[torch.Generator().manual_seed(seed + index) for index in range(len(tasks))],
        output_type="np",
        _auto_resize=False,
    ).images
    return [(image * 255).round().astype(np.uint8) for image in images]


def judged(task: Task, result: Pixels) -> dict[str, bool]:
    """Return what the result shows of the task, and the same apart by phrasing."""
    seen = Judged(
        edit=task.edit,
        said=task.said,
        before=look_at(task.before),
        wanted=look_at(task.wanted),
        result=look_at(result),
    )
    checks = check_edit(seen)
    wording = "new phrasing" if task.is_new_phrasing else "known phrasing"
    return checks | {f"{name} ({wording})": checks[name] for name in ("done", "kept")}


def load(checkpoint: Path, args: argparse.Namespace) -> Any:
    """Return diffusers' own pipeline of the checkpoint."""
    dtype = getattr(torch, args.dtype)
    pipeline: Any = FluxKontextPipeline.from_pretrained(checkpoint, torch_dtype=dtype).to(args.device)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def painted(pipeline: Any, tasks: list[Task], args: argparse.Namespace) -> list[Pixels]:
    """Return one edited picture a task, painted in batches."""
    starts = range(0, len(tasks), args.batch)
    return [image for start in starts for image in paint(pipeline, tasks[start : start + args.batch], args, start)]


def _sheet(tasks: list[Task], results: list[Pixels], path: Path) -> None:
    """Write pictures before their edits in one row, and the edited ones in the next."""
    rows = []
    for start in range(0, min(len(tasks), 4 * SHEET_COLUMNS), SHEET_COLUMNS):
        chosen = slice(start, start + SHEET_COLUMNS)
        if len(tasks[chosen]) == SHEET_COLUMNS:
            rows += [np.concatenate([task.before for task in tasks[chosen]], 1), np.concatenate(results[chosen], 1)]
    if rows:
        Image.fromarray(np.concatenate(rows)).quantize(128).save(path, optimize=True)


def evaluate(args: argparse.Namespace) -> dict[str, Any]:
    """Paint and judge the held-out edits, print the failed ones if asked to, and return settings and shares."""
    pipeline, start_s = load(args.checkpoint, args), time.monotonic()
    tasks = held_out_tasks(args.prompts, args.seed, height=args.height, width=args.width)
    results = painted(pipeline, tasks, args)
    scored = [(task.said.text, judged(task, result)) for task, result in zip(tasks, results, strict=True)]
    for text, checks in scored:
        if args.verbose and not checks["both"]:
            print(f"{'kept' if checks['kept'] else 'done' if checks['done'] else 'neither'}: {text}")
    few = tasks[:: args.long_every] if args.long_every else []
    long = argparse.Namespace(**vars(args) | {"tokens": LONG_LENGTH})
    long_scored = [
        (task.said.text, judged(task, result)) for task, result in zip(few, painted(pipeline, few, long), strict=True)
    ]
    if args.sheet:
        _sheet(tasks, results, args.sheet)
    settings = {name: getattr(args, name) for name in SETTINGS}
    return {
        "model": MODEL,
        **settings,
        "wall_s": round(time.monotonic() - start_s, 1),
        "checks": summary(scored),
        f"checks at {LONG_LENGTH} tokens": summary(long_scored),
    }


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINTS / MODEL)
    parser.add_argument("--prompts", type=int, default=240)
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--height", type=int, default=128)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, default=2.5)
    parser.add_argument("--tokens", type=int, default=MAX_LENGTH, help="to which prompts are padded")
    parser.add_argument("--long-every", type=int, default=LONG_SHARE, help="of how many edits one has long prompts too")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--sheet", type=Path, help="a picture of the first 64 edits")
    parser.add_argument("--verbose", action="store_true", help="print the edits that failed")
    return parser


def evaluation_options(**changes: Any) -> argparse.Namespace:
    """Return the default options with `changes`."""
    return argparse.Namespace(**vars(_options().parse_args([])) | changes)


def main() -> None:
    print(json.dumps(evaluate(_options().parse_args())))


if __name__ == "__main__":
    main()
