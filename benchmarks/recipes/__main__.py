"""Recipes, their switches, attention in float8 and adapters at run time behind ``troupe serve``, over HTTP.

    python -m benchmarks.recipes flux-shapes --config laptop --size 128x128
    python -m benchmarks.recipes FLUX.1-dev --config gpu1 --folder /tmp/flux --size 1024x1024
                                 [--steps 28] [--recipes turbo-8] [--parts recipes,switch] [--out FILE] [--logs FOLDER]

A published model lies in ``--folder``, and is written there with random weights if nothing is there. So are the
adapters of its recipes in ``--adapters``: random values, in the layouts, ranks and dtypes of the published files.
``flux-shapes`` and other models of ``--config`` need no folder. ``--parts`` are those of ``benchmarks.recipes.parts``.
Each result is a line, and ``--out`` is written after each. If a part fails, the others go on and the status is 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.application.client import Client
from benchmarks.recipes.parts import PARTS, USUAL, Part
from benchmarks.recipes.requests import Served
from benchmarks.recipes.served import config_with_recipes
from benchmarks.results import tell
from benchmarks.serving.application import serving
from benchmarks.serving.settings import add_options, add_part_options, argument_type
from pipelines.size import Size

TIMEOUT_S = 120.0


def main(words: Sequence[str] | None = None) -> None:
    arguments = parse(words)
    document: dict[str, Any] = {"model": arguments.model, "config": arguments.config, "set": arguments.set}
    with closing(measured(arguments)) as results:
        tell(document, results, arguments.out)
    sys.exit(1 if any("error" in result for result in document["results"]) else 0)


def measured(arguments: argparse.Namespace) -> Generator[dict[str, Any]]:
    """Yield the results as they come."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        began_s = time.perf_counter()
        config = config_with_recipes(arguments, arguments.adapters or Path(name))
        yield {"part": "written", "took_s": round(time.perf_counter() - began_s, 1)}
        with serving(config, keep_logs_in=arguments.logs) as application, Client(application.url) as client:
            client.timeout = TIMEOUT_S
            served = Served(
                application=application,
                client=client,
                config=config,
                fields=fields_of(arguments.size),
                num_steps=arguments.steps,
                repeats=arguments.repeats,
            )
            yield {"part": "ready", "took_s": round(application.ready_s, 1), "recipes": served.recipes}
            yield from of_parts(served, arguments.parts)


def of_parts(served: Served, parts: Mapping[str, Part]) -> Iterator[dict[str, Any]]:
    """Yield the results of each part; the error of one that fails."""
    for name, part in parts.items():
        began_s = time.perf_counter()
        try:
            for found in part(served):
                yield {"part": name, **found}
        except Exception as error:  # the others tell something without it
            yield {"part": name, "error": repr(error)}
        print(f"{name}: {time.perf_counter() - began_s:.1f} s", file=sys.stderr, flush=True)


def fields_of(size: Size | None) -> dict[str, Any]:
    """Return a size as fields of a request; None: as the model's."""
    if size is None:
        return {}
    frames = {} if size.num_frames is None else {"num_frames": size.num_frames}
    return {"size": f"{size.width}x{size.height}", **frames}


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="flux-shapes")
    add_options(parser, model=False)
    parser.add_argument(
        "--size", type=argument_type(Size.parse), help="1024x1024, or 832x480x17 for clips of 17 frames"
    )
    parser.add_argument("--steps", type=int, default=0, help="of ways that bring none; the model's by default")
    parser.add_argument("--recipes", nargs="+", default=[], help="only these of the published ones")
    parser.add_argument("--adapters", type=Path, help="folder where the adapters lie or are written")
    parser.add_argument("--repeats", type=int, default=3, help="of each request after its first")
    parser.add_argument("--logs", type=Path, help="folder for the application's logs, also of a start that fails")
    add_part_options(parser, PARTS, USUAL)
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
