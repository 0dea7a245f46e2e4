"""Times of a published auto-encoder at full size (random weights), on one GPU and on several of one process.

    python -m benchmarks.decode [MODEL] [--size 2048x2048] [--devices 1 2] [--memory-gib GIB] [--repeats 5] [--out FILE]
    python -m benchmarks.decode Wan2.1-T2V-14B --size 832x480x81 --devices 1 2
    python -m benchmarks.decode FLUX.1-dev --size 1024x1024 --devices 1 --prepared

Times are those of pixels on the device, of frames in memory and of a file. ``--prepared`` is what ``compile: true``
does on a GPU. "alike_db" compares the frames with those of the first number of devices. Without GPUs all runs on the
CPU. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from benchmarks.timing import BF16_TFLOPS
from deployments.stages.common import Workers
from deployments.stages.vae_decoder import NUM_ENCODINGS, ClipFinisher
from engines.core.parcel import Parcel
from pipelines.blocks.decoder import BlocksDecoder
from pipelines.checkpoint import Checkpoint
from pipelines.media.encode import encode_frames
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
    prepared: bool = False

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
        return Checkpoint(self.folder, own).decoder(
            compiled=self.prepared, memory_bytes=self.memory_bytes, others=others
        )


def decodings(case: Case, counts: Iterable[int]) -> Iterator[dict[str, Any]]:
    """Yield the ceiling, then times, memory and likeness for each of ``counts`` devices."""
    first_FHWC = None
    for count in counts:
        for name in case.names(count) if case.kind == "cuda" else ():
            torch.cuda.reset_peak_memory_stats(name)
        decoder = case.decoder(count)
        if first_FHWC is None:
            yield ceiling(case, decoder)
        frames_FHWC = decoder.decode(case.latents, case.request)
        first_FHWC = frames_FHWC if first_FHWC is None else first_FHWC
        likeness = {"alike_db": alike_db(frames_FHWC, first_FHWC)}
        yield {"num_devices": count, **_times_ms(case, decoder, frames_FHWC), **likeness, **_peak_gib(case, count)}


def ceiling(case: Case, decoder: BlocksDecoder) -> dict[str, Any]:
    """Return the work of a decode, and the time that one GPU takes for it at its peak."""
    with FlopCounterMode(display=False) as counter:
        decoder.pixels(case.latents)
    flop = counter.get_total_flops()
    return {"tflop": flop / 1e12, "ceiling_ms_of_one": round(flop / BF16_TFLOPS / 1e9, 3)}


def _times_ms(case: Case, decoder: BlocksDecoder, frames_FHWC: NDArray[np.uint8]) -> dict[str, Any]:
    """Time pixels, frames and the file: a clip's from latents, a picture's from frames."""
    calls: dict[str, Callable[[], object]] = {
        "pixels_ms": lambda: decoder.pixels(case.latents),
        "frames_ms": lambda: decoder.decode(case.latents, case.request),
    }
    if case.request.kind == "video":
        clips = ClipFinisher(decoder, Workers(1, "decoding"), Workers(NUM_ENCODINGS, "encoding"))
        parcel = Parcel.of(case.latents)
        calls["file_ms"] = lambda: clips.finish(parcel, case.request)
    else:
        calls["file_ms"] = lambda: encode_frames(frames_FHWC, "png")
    return {name: time_ms(call, case.repeats).rounded() for name, call in calls.items()}


def time_ms(call: Callable[[], object], repeats: int) -> Spread:
    """Time ``call`` after a warm-up, with the work of the GPUs."""
    times_ms = []
    for _ in range(WARM_UP + repeats):
        start_s = time.perf_counter()
        call()
        for index in range(torch.cuda.device_count()):
            torch.cuda.synchronize(index)
        times_ms.append(1000 * (time.perf_counter() - start_s))
    return Spread.of(times_ms[WARM_UP:])


def alike_db(frames_FHWC: NDArray[np.uint8], others_FHWC: NDArray[np.uint8]) -> float:
    """Return the PSNR of 8-bit values; 120 if they are equal."""
    error = np.square(frames_FHWC.astype(np.float32) - others_FHWC).mean(dtype=np.float64)
    return round(float(10 * np.log10(255**2 / max(error, 255**2 / 1e12))), 1)


def _peak_gib(case: Case, num_devices: int) -> dict[str, list[float]]:
    """Return the highest memory of this process on each device."""
    if case.kind != "cuda":
        return {}
    return {"peak_gib": [round(torch.cuda.max_memory_allocated(name) / 2**30, 2) for name in case.names(num_devices)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="FLUX.1-dev")
    parser.add_argument("--size", type=Size.parse, default=Size(width=2048, height=2048))
    parser.add_argument("--devices", type=int, nargs="+", default=[1, max(1, torch.cuda.device_count())])
    parser.add_argument("--memory-gib", type=float)
    parser.add_argument("--prepared", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the model is, or is written if nothing is there")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    document: dict[str, Any] = {"model": options.model, "size": str(options.size), "prepared": options.prepared}
    document["hardware"] = torch.cuda.get_device_name() if kind == "cuda" else platform.processor()
    document |= {"cores": len(os.sched_getaffinity(0)), "torch": torch.__version__}
    with tempfile.TemporaryDirectory() as name:
        folder = options.folder or Path(name) / options.model
        if not folder.exists():
            write_vae(options.model, folder, torch.device(kind))
        case = Case(
            folder=folder,
            size=options.size,
            kind=kind,
            memory_bytes=None if options.memory_gib is None else int(options.memory_gib * 2**30),
            repeats=options.repeats,
            prepared=options.prepared,
        )
        tell(document, decodings(case, options.devices), options.out)


if __name__ == "__main__":
    main()
