"""What ``benchmarks.model_step`` is asked for."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.published import MAKERS as PEERS
from benchmarks.turns import Meeting, add_options
from pipelines.size import Size

MODELS = ("Z-Image-Turbo", "Qwen-Image", "FLUX.2-klein-4B", "FLUX.2-dev")
CLIPS = ("Wan2.2-I2V-A14B", "HunyuanVideo-1.5-480p_t2v", "LTX-2", "Cosmos3-Nano")
MAKERS = ("eager", "diffusers", *PEERS, "ours compiled", "ours", "ours filled")


class Arguments(argparse.Namespace):
    models: Sequence[str] = MODELS
    size: Size | None = None
    tokens: int | None = None
    branches: int = 1
    batch: int = 1
    repeats: int = 20
    heat_s: float = 5.0
    makers: Sequence[str] = ("eager", "diffusers", "ours")
    strategies: Sequence[str] = ("ulysses",)
    precision: str = "native"
    profile: bool = False
    meet: Path | None = None
    turn: tuple[int, int] = (1, 0)
    meeting: Meeting | None = None
    out: Path | None = None


def parse(words: Sequence[str], about: str | None = None) -> Arguments:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=Arguments.models, help=f"clips: {', '.join(CLIPS)}")
    parser.add_argument("--size", type=Size.parse, help="WIDTHxHEIGHT, of clips WIDTHxHEIGHTxFRAMES")
    parser.add_argument("--tokens", type=int, help="of the prompt")
    parser.add_argument(
        "--branches", type=int, default=Arguments.branches, help="forwards of one step: 2 with guidance"
    )
    parser.add_argument(
        "--batch", type=int, default=Arguments.batch, help="pictures in one forward, of models that take several"
    )
    parser.add_argument("--repeats", type=int, default=Arguments.repeats)
    parser.add_argument("--heat-s", type=float, default=Arguments.heat_s, help="for which GPUs work before them")
    known = ", ".join(MAKERS)
    parser.add_argument("--makers", nargs="+", default=Arguments.makers, choices=MAKERS, help=known)
    parser.add_argument("--strategies", nargs="+", default=Arguments.strategies, help="of ours, one after the other")
    parser.add_argument("--precision", default=Arguments.precision, help="of ours")
    parser.add_argument("--profile", action="store_true", help="one rank alone: where ours spends its time")
    add_options(parser)
    parser.add_argument("--out", type=Path)
    return parser.parse_args(words, namespace=Arguments())
