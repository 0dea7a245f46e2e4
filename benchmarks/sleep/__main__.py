"""Time and memory of putting weights to sleep and waking them up.

    python -m benchmarks.sleep engine [--precisions native fp8] [--side 1024] [--rounds 3]
    torchrun --nproc_per_node 2 -m benchmarks.sleep engine --strategy ulysses
    python -m benchmarks.sleep application --ranks 2 --published FLUX.1-dev Z-Image Wan2.2-TI2V-5B --folders DIR

``engine`` needs no Ray: FLUX.1-dev with random weights, its memory asleep and awake, seconds of each, and whether the
first step afterwards has the same bits, with and without an addition. ``application`` starts models that share GPUs,
sends mixed traffic, kills a rank of each sleeping model, and times requests for a sleeping one. ``--small`` and the
shipped models run on a CPU. The last line is one JSON
document.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.results import status_of, tell

CASES = ("mixed", "kill", "swap")


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    engine, application = parts.add_parser("engine"), parts.add_parser("application")
    for part in (engine, application):
        part.add_argument("--rounds", type=int, default=3)
        part.add_argument("--pinned-gib", type=float, help="host memory that may be pinned; all by default")
        part.add_argument("--out", type=Path)
    engine.add_argument("--precisions", nargs="+", default=["native", "fp8"])
    engine.add_argument("--strategy", default="ulysses")
    engine.add_argument("--side", type=int, default=1024)
    engine.add_argument("--small", action="store_true", help="a model for a CPU")
    application.add_argument("--config", default="laptop")
    application.add_argument("--ranks", type=int, default=1, help="of published models")
    application.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE")
    application.add_argument("--published", nargs="+", default=[], help="published models, with random weights")
    application.add_argument("--folders", type=Path, default=Path("out/models"), help="where they lie or are written")
    application.add_argument("--memory-gib", type=float, help="of each GPU for the models")
    application.add_argument("--steps", type=int, help="of each request; the models' own by default")
    application.add_argument("--clip", nargs="+", default=[], metavar="KEY=VALUE", help="fields of requests for clips")
    application.add_argument("--cases", nargs="+", choices=CASES, default=CASES, help="what is measured, in this order")
    application.add_argument("--seconds", type=float, default=60.0, help="of mixed traffic")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse(words)
    if arguments.part == "application":
        from benchmarks.sleep import application
        from benchmarks.sleep.engine import machine

        document = {"part": "application", "published": arguments.published, **machine()}
        tell(document, application.cases(arguments), arguments.out)
        return status_of(document["results"])
    return run_engine(arguments)


def run_engine(arguments: argparse.Namespace) -> int:
    import torch

    from benchmarks.distributed import start_distributed
    from benchmarks.sleep import engine

    rank, arguments.num_ranks = start_distributed()
    on_gpu = torch.cuda.is_available() and not arguments.small
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    results = engine.cases(arguments, device)
    if rank:
        return status_of([*results])
    document = {"part": "engine", "side": arguments.side, **engine.machine()}
    tell(document, results, arguments.out)
    return status_of(document["results"])


if __name__ == "__main__":
    sys.exit(main())
