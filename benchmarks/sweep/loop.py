"""The loop of a sweep, and the picture or clip that it asks every model for, when and on what."""

from __future__ import annotations

import argparse
import datetime
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from filelock import FileLock

from benchmarks.models.folders import first_twins
from benchmarks.results import status_of
from benchmarks.sweep.result_file import ERROR, Result, ResultFile
from pipelines.checkpoint import Checkpoint
from pipelines.defaults import Defaults
from pipelines.size import Size, largest_num_frames

FEW_STEPS = 6
SPARE_BYTES = 4 * 2**30
"""On the disk, beside all weights: what Ray and compilers keep."""
MOST_SAID = 1000
PATHS = re.compile(rf"(?:/tmp|{re.escape(str(Path.cwd()))})/[^\s:,]+")
"""Files of one machine, whose folders say nothing to others."""
Case = tuple[Mapping[str, Any], Callable[[Result], None]]
"""Keys of a result, and a function that adds the rest step by step: an error leaves what is there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepRequest:
    """The request to every model: its own size, or ``size``; at most ``num_steps`` of its default steps."""

    size: Size | None = None
    num_steps: int = FEW_STEPS
    max_frames: int | None = None
    """Clips that would have more are shorter: the most frames up to these that the model makes."""

    def steps_of(self, defaults: Defaults) -> int:
        return max(defaults.min_steps, min(self.num_steps, defaults.num_inference_steps))

    def size_of(self, defaults: Defaults) -> Size:
        """Return the size of requests; a picture has no number of frames."""
        size = self.size or Size(width=defaults.width, height=defaults.height)
        if defaults.kind != "video":
            return Size(width=size.width, height=size.height)
        frames = size.num_frames or defaults.num_frames
        if self.max_frames and frames > self.max_frames:
            frames = max(defaults.min_frames, largest_num_frames(self.max_frames, defaults.frame_multiple))
        return Size(width=size.width, height=size.height, num_frames=frames)

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--steps", type=int, default=FEW_STEPS, help="of each picture or clip, as far as a model may"
        )
        parser.add_argument("--size", type=Size.parse, help="of all: by default each model's own")
        parser.add_argument("--frames", type=int, help="the most that a clip has: by default each model's own number")
        parser.add_argument("--lock", type=Path, help="a file: sweeps that name the same measure one after the other")

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> SweepRequest:
        return cls(size=arguments.size, num_steps=arguments.steps, max_frames=arguments.frames)

    def words(self) -> Iterator[str]:
        """Yield the options that ``of`` reads this from."""
        yield from ("--steps", str(self.num_steps))
        if self.size:
            yield from ("--size", str(self.size))
        if self.max_frames:
            yield from ("--frames", str(self.max_frames))


def turn_of(lock: Path | None) -> AbstractContextManager[Any]:
    """Return a context in which no other holder of ``lock`` measures; one that does nothing without it."""
    return FileLock(lock) if lock else nullcontext()


def facts(**keys: Any) -> dict[str, Any]:
    """Return ``keys`` with the date, the hardware and the version of torch."""
    hardware = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {**keys, "date": today, "hardware": hardware, "torch": torch.__version__}


def run_all(cases: Generator[Case], arguments: argparse.Namespace) -> NoReturn:
    """Measure the cases that ``--out`` has no line of. End with 1 if nothing was measured.

    One that fails leaves the others their turn. None is begun after ``--limit-s``.
    """
    result_file, begun_s, results = ResultFile(arguments.out), time.monotonic(), list[Result]()
    with closing(cases):
        for keys, measure in cases:
            if result_file.has(**keys, failed=not arguments.again):
                continue
            if (began_s := time.monotonic()) > begun_s + arguments.limit_s:
                print(f"the time is over: {keys} and what follows are left", file=sys.stderr, flush=True)
                break
            result = facts(**keys)
            try:
                measure(result)
            except Exception as error:
                result[ERROR] = said_of(error)
                if notes := getattr(error, "__notes__", []):
                    result["out_of_memory"] = notes[0]
            results.append(result | {"took_s": round(time.monotonic() - began_s, 1)})
            result_file.add(results[-1])
            print(json.dumps(results[-1]), flush=True)
    sys.exit(status_of(results))


def said_of(error: BaseException) -> str:
    """Return the messages of ``error`` and, if it came while another was handled, of that one before."""
    said = PATHS.sub("FOLDER", f"{type(error).__name__}: {error}")[-MOST_SAID:]
    before = error.__context__
    return said if before is None or error.__suppress_context__ else f"{said_of(before)}; then {said}"


def check_room(name: str, folder: Path, *, twins: bool) -> None:
    """Raise ValueError if the disk of ``folder`` has no room for the model, written with or without ``twins``."""
    needed_bytes = disk_bytes(name, twins=twins) + SPARE_BYTES
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise ValueError(
            f"{name} takes {needed_bytes / 2**30:.0f} GiB on the disk, {free_bytes / 2**30:.0f} are free in {folder}: "
            "name another folder with --scratch"
        )


def disk_bytes(name: str, *, twins: bool) -> int:
    """Return the bytes of all weights of ``name`` in bfloat16, also of parts that are float32 in memory."""
    checkpoint = Checkpoint.of_configuration(name, "meta", "bfloat16")
    parts = checkpoint.footprint(checkpoint.defaults.request())
    first = first_twins(checkpoint.path)
    modules = checkpoint.weightless().modules
    steps = sum(
        sum(weight.nbytes for weight in module.parameters())
        for part, module in modules.items()
        if not twins or first.get(part, part) == part
    )
    wide = checkpoint.spec.float32_parts
    beside = (*parts.encoder.items(), *parts.decoder.items())
    return steps + sum((size or 0) // (2 if part in wide else 1) for part, size in beside)


def add_run_options(parser: argparse.ArgumentParser, out: Path, what: str) -> None:
    """Add the options of a sweep that goes on where it stopped."""
    parser.add_argument("--out", type=Path, default=out)
    parser.add_argument("--limit-s", type=float, default=float("inf"), help=f"after which no {what} is begun")
    parser.add_argument("--again", action="store_true", help="those that failed as well")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()), help="where models are written to")
    parser.add_argument("--twins", action="store_true", help="write equal transformers once")
    SweepRequest.add_options(parser)
