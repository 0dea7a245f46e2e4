"""Frame of the programs that time steps: device, results as they come, errors, profiles, and the end of all ranks."""

from __future__ import annotations

import gc
import json
import os
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from benchmarks.distributed import start_distributed
from benchmarks.results import status_of
from benchmarks.timing import rank_synchronize
from benchmarks.turns import Meeting
from engines.core.tensors import relative_difference

BF16_TFLOPS, FP8_TFLOPS = 790.0, 1500.0
"""Rate of an H200 in a large bf16 product on random data, and about what is left of twice that in float8."""
MAX_ERROR_CHARACTERS = 3000
NUM_ADDITIONS = 2_000_000

Result = dict[str, Any]


@dataclass(kw_only=True, slots=True)
class StepProgram:
    """A process of the program. The first rank speaks for all."""

    rank: int
    world: int
    out: Path | None
    """File for the document, written after every result: a later one may hang."""
    meeting: Meeting | None = None
    """Where processes that prepare at the same time take turns to be timed."""
    document: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def begin(cls, out: Path | None) -> StepProgram:
        """Join the other ranks and print the hardware."""
        rank, world = start_distributed()
        program = cls(rank=rank, world=world, out=out)
        facts = {"hardware": f"{world} x {program.device_name}", "torch": torch.__version__, "python_s": python_s()}
        program.document = {**facts, "results": []}
        program.say(
            f"{facts['hardware']}, torch {facts['torch']}, ten million additions in Python {facts['python_s']} s"
        )
        return program

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.rank) if torch.cuda.is_available() else torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if torch.cuda.is_available() else torch.float32

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name(self.device) if torch.cuda.is_available() else "CPU"

    @property
    def results(self) -> list[Result]:
        found: list[Result] = self.document["results"]
        return found

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def add(self, result: Result, text: str = "") -> None:
        """Keep ``result``, and print it or ``text``."""
        self.say(text or json.dumps(result))
        self.results.append(result)
        if self.rank == 0 and self.out:
            self.out.write_text(json.dumps(self.document))

    def end(self, groups: Iterable[Sequence[Mapping[str, Any]]]) -> NoReturn:
        """Print the document. The status is 1 if one of ``groups`` has no result without an error."""
        rank_synchronize()
        if self.meeting:
            self.meeting.leave()
        self.say(json.dumps(self.document))
        os._exit(max(map(status_of, groups)))  # graphs hold the communicator: an orderly shutdown would wait for them


def python_s() -> float:
    """Return the seconds of ten million additions: steps that are not captured wait for Python."""
    start_s, total = time.perf_counter(), 0
    for number in range(NUM_ADDITIONS):
        total += number
    return round((time.perf_counter() - start_s) * 10_000_000 / NUM_ADDITIONS, 2)


def attempt(run: Callable[[], Result]) -> Result:
    """Return what ``run`` does, or its "error". A maker that fails leaves the others their turn and their memory."""
    try:
        return run()
    except Exception:
        error = traceback.format_exc()[-MAX_ERROR_CHARACTERS:]
    gc.collect()  # once nothing holds the frames of what failed
    torch.cuda.empty_cache()
    return {"error": error}


def relative_error(given: Tensor, expected: Tensor, allowed: float | None = None) -> float:
    """Return it with three digits. AssertionError unless it is below ``allowed``."""
    error = relative_difference(given, expected)
    assert allowed is None or error < allowed, f"wrong answer: relative error {error:.3f}"
    return float(f"{error:.2e}")
