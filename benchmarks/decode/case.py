"""One size of one published auto-encoder with random weights, and what the benchmarks of decoding share."""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.models.folders import write_vae
from benchmarks.results import Spread, tell
from benchmarks.step_program import BF16_TFLOPS
from pipelines.blocks.decoder import BlocksDecoder
from pipelines.checkpoint import Checkpoint
from pipelines.request import MediaRequest
from pipelines.size import Size

WARM_UP = 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """One size of one model."""

    folder: Path
    size: Size
    kind: str
    """"cuda" or "cpu"."""
    memory_bytes: int | None
    repeats: int

    @cached_property
    def request(self) -> MediaRequest:
        return Checkpoint(self.folder).defaults.request(self.size)

    @cached_property
    def latents(self) -> Mapping[str, Any]:
        """Noise on the CPU, where latents of another process arrive."""
        return Checkpoint(self.folder).first_latents(self.request)

    def names(self, num_devices: int) -> list[str]:
        return [f"{self.kind}:{index}" if self.kind == "cuda" else self.kind for index in range(num_devices)]

    def decoder(self, num_devices: int) -> BlocksDecoder:
        own, *others = self.names(num_devices)
        return Checkpoint(self.folder, own).decoder(memory_bytes=self.memory_bytes, others=others)


def ceiling(case: Case, decoder: BlocksDecoder) -> dict[str, Any]:
    """Return the work of a decode, and the time that one GPU takes for it at its peak."""
    with FlopCounterMode(display=False) as counter:
        decoder.pixels(case.latents)
    flop = counter.get_total_flops()
    return {"tflop": flop / 1e12, "ceiling_ms_of_one": round(flop / BF16_TFLOPS / 1e9, 3)}


def time_ms(call: Callable[[], object], repeats: int, *, waits: bool = True) -> Spread:
    """Time ``call`` after a warm-up, with the work of the GPUs if ``waits``."""
    times_ms = []
    for _ in range(WARM_UP + repeats):
        start_s = time.perf_counter()
        call()
        if waits:
            synchronize()
        times_ms.append(1000 * (time.perf_counter() - start_s))
        synchronize()
    return Spread.of(times_ms[WARM_UP:])


def synchronize() -> None:
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)


def alike_db(frames_FHWC: NDArray[np.uint8], others_FHWC: NDArray[np.uint8]) -> float:
    """Return the PSNR of 8-bit values; 120 if they are equal."""
    error = np.square(frames_FHWC.astype(np.float32) - others_FHWC).mean(dtype=np.float64)
    return round(float(10 * np.log10(255**2 / max(error, 255**2 / 1e12))), 1)


def run(
    benchmark: Callable[[Case, Sequence[int]], Iterable[dict[str, Any]]],
    description: str | None,
    model: str,
    size: Size,
    arguments: Sequence[str],
) -> None:
    """Run ``benchmark`` on a case and numbers of devices, as the command line says; print and write its results."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=model)
    parser.add_argument("--size", type=Size.parse, default=size)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, max(1, torch.cuda.device_count())])
    parser.add_argument("--memory-gib", type=float)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the model is, or is written if nothing is there")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    has_gpus = torch.cuda.is_available()
    document: dict[str, Any] = {
        "model": options.model,
        "size": str(options.size),
        "hardware": torch.cuda.get_device_name() if has_gpus else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = options.folder or Path(name) / options.model
        if not folder.exists():
            write_vae(options.model, folder, torch.device("cuda" if has_gpus else "cpu"))
        case = Case(
            folder=folder,
            size=options.size,
            kind="cuda" if has_gpus else "cpu",
            memory_bytes=None if options.memory_gib is None else int(options.memory_gib * 2**30),
            repeats=options.repeats,
        )
        tell(document, benchmark(case, options.devices), options.out)
