"""A published model at full size (random weights) behind ``troupe serve``: pictures, edits, clips, crowds, a kill.

    python -m benchmarks.application [MODEL] [--config gpu2] [--set KEY=VALUE] [--folder FOLDER] [--side 1024]
                                     [--at-once 8] [--clip 832x480x81@8] [--parts pictures,overlap] [--out FILE]

    python -m benchmarks.application flux-shapes --config laptop --side 0 --parts pictures,at_once,footprint

A published model replaces that of the shipped configuration ``--config``. It lies in ``--folder``, and is written there
if nothing is there. A model of ``--config`` runs beside its others. ``--parts`` are those of
``benchmarks.application.parts``. If one fails, the others go on and the status is 1. Parts of pictures are null for a
model that makes clips, and the other way round. ``--out`` is written after each part. The last line is one JSON
document.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.application.client import Client
from benchmarks.application.parts import ANY_CLIP, PARTS, USUAL, ClipShape, Part, Visit, is_for
from benchmarks.faults.timeline import records_of
from benchmarks.serving.application import serving
from benchmarks.serving.settings import add_options, add_part_options, argument_type, config_of
from deployments.cli.serving import load_config
from deployments.config import ServeConfig

FAILED = "failed"


def main(words: Sequence[str] | None = None) -> None:
    arguments = parse(words)
    document: dict[str, Any] = {"model": arguments.model, "config": arguments.config, "set": arguments.set}
    try:
        with closing(measured(arguments)) as parts:
            for found in parts:
                document |= found
                print(json.dumps(found), flush=True)
                if arguments.out:
                    arguments.out.write_text(json.dumps(document))
    finally:
        print(json.dumps(document), flush=True)
    sys.exit(1 if document.get(FAILED) else 0)


def measured(arguments: argparse.Namespace) -> Generator[dict[str, Any]]:
    """Yield parts of the document as they come."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        began_s = time.perf_counter()
        config, model = config_and_name(arguments, Path(name))
        yield {"written_s": round(time.perf_counter() - began_s, 1)}
        with serving(config) as application:
            yield {"ready_s": round(application.ready_s, 1), "strategy": decided(application.logs)}
            with Client(application.url, arguments.side, model) as client:
                asked = {"at_once": arguments.at_once, "clips": arguments.clip}
                visit = Visit(application=application, client=client, **asked)
                yield from of_parts(visit, arguments.parts)
            ending_s = time.perf_counter()
        yield {"end_s": round(time.perf_counter() - ending_s, 1)}


def config_and_name(arguments: argparse.Namespace, scratch: Path) -> tuple[ServeConfig, str]:
    """Return the configuration and, where it has several models, the name of the one that is measured."""
    if arguments.folder is None and arguments.model in {one.name for one in load_config(arguments.config).app.models}:
        return config_of(argparse.Namespace(**{**vars(arguments), "model": None})), arguments.model
    folder = arguments.folder or scratch / arguments.model
    return config_of(argparse.Namespace(**{**vars(arguments), "folder": folder})), ""


def of_parts(visit: Visit, parts: Mapping[str, Part]) -> Iterator[dict[str, Any]]:
    """Yield each part's results. After a failure, yield all errors so far."""
    failed: dict[str, str] = {}
    yield {"steps": visit.card["defaults"]["num_inference_steps"]}
    for name, part in parts.items():
        began_s = time.perf_counter()
        try:
            found = part(visit) if is_for(name, visit) else {name: None}
        except Exception as error:  # the others tell something without it
            failed[name] = repr(error)
            yield {FAILED: dict(failed)}
        else:
            yield found
        print(f"{name}: {time.perf_counter() - began_s:.1f} s", file=sys.stderr, flush=True)


def decided(logs: Path) -> list[dict[str, Any]]:
    """Return the ranks' decisions about strategies from a Ray session's ``logs``, each once."""
    lines = [record for record in records_of(logs) if str(record["message"]).startswith(("strategy is", "strategy as"))]
    decisions = [{name: one[name] for name in ("message", "times_ms") if name in one} for one in lines]
    return [one for number, one in enumerate(decisions) if one not in decisions[:number]]


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="FLUX.2-klein-4B")
    add_options(parser, config="gpu2", model=False)
    parser.add_argument("--side", type=int, default=1024, help="of most pictures, in pixels; 0: the model's size")
    parser.add_argument("--at-once", type=int, default=8, help="pictures that come together in the part of that name")
    parser.add_argument(
        "--clip",
        type=argument_type(ClipShape.of),
        nargs="+",
        default=(ANY_CLIP,),
        metavar="WxHxFRAMES[@STEPS]",
        help="of the part clips; by default what the model makes by default",
    )
    add_part_options(parser, PARTS, USUAL)
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
