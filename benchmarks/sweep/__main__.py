"""Every published model at full size with random weights, once: through the whole application, on each number of GPUs.

    python -m benchmarks.sweep [MODEL ...] [--ranks 1 2] [--out FILE] [--limit-s 3000] [--again]
        [--steps 6] [--frames 33] [--lock FILE] [--twins]

A model is written to ``--scratch`` with random weights, served by ``troupe serve``, asked for a picture or a clip three
times and, where it takes pictures, for one that is made of some, and deleted. Models whose text encoders are not known
(``benchmarks.models.folders``) run without: their steps and their decoding (``benchmarks.sweep.lone``).

Each is one line of JSON in ``--out``: its times, or the "error" that says why there are none. A sweep that is started
again goes on with those that have no line (with ``--again``, also those that have an error). It begins none after
``--limit-s``. Sweeps of other models may run beside it, on the same GPU too: with the same ``--lock`` they write and
start models side by side, and measure one after the other. ``--twins`` writes transformers with one configuration
once, such as both of Wan 2.2. It ends with 1 if it measured nothing.
``.ci/models_document.py`` makes a column of docs/reference/models.md of it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.models.folders import ENCODERS
from benchmarks.serving.settings import write_model
from benchmarks.sweep import whole
from benchmarks.sweep.loop import Case, SweepRequest, add_run_options, check_room, run_all, turn_of
from pipelines.loading import published_models

OUT = Path("benchmarks/reports/sweep.jsonl")
LONE = "benchmarks.sweep.lone"
LONE_S = 1200.0


def main(words: Sequence[str] | None = None) -> None:
    arguments = parse(words)
    run_all(cases(arguments), arguments)


def cases(arguments: argparse.Namespace) -> Generator[Case]:
    """Yield all models on the fewest GPUs first."""
    for ranks in arguments.ranks:
        for name in arguments.models:
            keys = {"model": name, "ranks": ranks}
            yield keys, lambda result, name=name, ranks=ranks: result.update(measured(name, ranks, arguments))


def measured(name: str, ranks: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the model on ``ranks`` GPUs. ValueError, RuntimeError and the like give the reason of a failure."""
    if torch.cuda.is_available() and ranks > torch.cuda.device_count():
        raise ValueError(f"{ranks} GPUs are asked for, {torch.cuda.device_count()} are here")
    settings, turn = SweepRequest.of(arguments), turn_of(arguments.lock)
    if Path(name).is_dir():
        return whole.measured(Path(name), ranks, settings, turn)
    if name not in ENCODERS:
        return lone(name, ranks, arguments)
    with tempfile.TemporaryDirectory(prefix="troupe_sweep_", dir=arguments.scratch) as scratch:
        check_room(name, arguments.scratch, twins=arguments.twins)
        write_model(name, Path(scratch) / name, twins=arguments.twins)
        return whole.measured(Path(scratch) / name, ranks, settings, turn)


def lone(name: str, ranks: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure in separate processes, whose memory is free afterwards. RuntimeError has their last line."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks > 1 else []
    lock = ["--lock", str(arguments.lock)] if arguments.lock else []
    command = [sys.executable, *launch, "-m", LONE, name, *SweepRequest.of(arguments).words(), *lock]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LONE_S)
    if ended.returncode:
        last = ended.stderr.strip().rpartition("\n")[2]
        raise RuntimeError(f"{LONE} ended with {ended.returncode}: {last}")
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=published_models(), help="published, or folders")
    parser.add_argument(
        "--ranks", nargs="+", type=int, default=[1], help="GPUs that work together, one after the other"
    )
    add_run_options(parser, OUT, "model")
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
