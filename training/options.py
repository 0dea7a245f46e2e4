"""Command-line options that the trainers share, and the `Budget` that they make."""

import argparse
from pathlib import Path

import torch

from training.loop import Budget
from training.shapes.reading import READING_WEIGHT


def run_options(description: str | None, *, minutes: float, learning_rate: float) -> argparse.ArgumentParser:
    """Return a parser with the options of every trainer."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True, help="checkpoints to resume from, and the loss log")
    parser.add_argument("--start", type=Path, help="go on from these exported weights instead of from nothing")
    parser.add_argument("--minutes", type=float, default=minutes, help="length of this piece")
    parser.add_argument("--total-minutes", type=float, help="length of all pieces; default: this one is all")
    parser.add_argument("--learning-rate", type=float, default=learning_rate)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--max-steps", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    return parser


def flow_options(
    description: str | None, *, minutes: float, batch: int, pool: int, chunk: int, vae: Path | None = None
) -> argparse.ArgumentParser:
    """Return a parser with the options of every trainer and what the trainers of transformers need besides. An
    auto-encoder must be given where there is none to fall back on."""
    parser = run_options(description, minutes=minutes, learning_rate=1e-3)
    parser.set_defaults(batch=batch)
    parser.add_argument("--vae", type=Path, required=vae is None, default=vae)
    parser.add_argument("--export", type=Path, required=True, help="where the finished pipeline goes")
    parser.add_argument("--captions", type=int, default=400_000)
    parser.add_argument("--pool", type=int, default=pool, help="latents kept")
    parser.add_argument("--chunk", type=int, default=chunk, help="latents replaced at a time")
    parser.add_argument("--muon", type=float, default=2.0, help="the blocks' learning rate over the rest's; 0: AdamW")
    parser.add_argument("--reading", type=float, default=READING_WEIGHT, help="weight of the reader's loss")
    return parser


def device_of(args: argparse.Namespace) -> tuple[str, bool]:
    """Return the device, and whether CUDA graphs are used there."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return device, device == "cuda" and not args.eager


def budget_of(args: argparse.Namespace, out: Path, *, ema_decay: float = 0.999) -> Budget:
    """Return the budget that the options ask for."""
    return Budget(
        out=out,
        minutes=args.minutes,
        total_minutes=args.total_minutes or args.minutes,
        learning_rate=args.learning_rate,
        muon=getattr(args, "muon", 0.0),
        resume=args.resume,
        ema_decay=ema_decay,
    )
