"""One size decoded on several numbers of devices."""

from __future__ import annotations

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

from benchmarks.spread import Spread
from deployments.stages.common import Workers
from deployments.stages.vae_decoder import NUM_ENCODINGS, ClipFinisher
from engines.core.parcel import Parcel
from pipelines.blocks.decoder import BlocksDecoder
from pipelines.checkpoint import Checkpoint
from pipelines.media import encode_frames
from pipelines.request import MediaRequest
from pipelines.size import Size

BF16_FLOP_PER_S = 790e12
"""What an H200 reaches in a large bf16 product on random data."""
WARM_UP = 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """``kind`` of devices: "cuda" or "cpu"."""

    folder: Path
    size: Size
    kind: str
    memory_bytes: int | None
    repeats: int

    @cached_property
    def request(self) -> MediaRequest:
        return Checkpoint(self.folder).defaults.request(self.size)

    @cached_property
    def latents(self) -> Mapping[str, Any]:
        """Noise, on the CPU, as it comes from another process."""
        return Checkpoint(self.folder).first_latents(self.request)

    def names(self, num_devices: int) -> list[str]:
        return [f"{self.kind}:{index}" if self.kind == "cuda" else self.kind for index in range(num_devices)]

    def decoder(self, num_devices: int) -> BlocksDecoder:
        own, *others = self.names(num_devices)
        return Checkpoint(self.folder, own).decoder(memory_bytes=self.memory_bytes, others=others)


def decodings(case: Case, counts: Iterable[int]) -> Iterator[dict[str, Any]]:
    """Yields the ceiling, then times, memory and likeness for each of ``counts`` devices."""
    flop, first_FHWC = None, None
    for count in counts:
        for name in case.names(count) if case.kind == "cuda" else ():
            torch.cuda.reset_peak_memory_stats(name)
        decoder = case.decoder(count)
        if flop is None:
            with FlopCounterMode(display=False) as counter:
                decoder.pixels(case.latents)
            flop = counter.get_total_flops()
            yield {"tflop": flop / 1e12, "ceiling_ms_of_one": round(1000 * flop / BF16_FLOP_PER_S, 3)}
        frames_FHWC = decoder.decode(case.latents, case.request)
        first_FHWC = frames_FHWC if first_FHWC is None else first_FHWC
        likeness = {"alike_db": _alike_db(frames_FHWC, first_FHWC)}
        yield {"num_devices": count, **_times_ms(case, decoder, frames_FHWC), **likeness, **_peak_gib(case, count)}


def _times_ms(case: Case, decoder: BlocksDecoder, frames_FHWC: NDArray[np.uint8]) -> dict[str, Any]:
    """Of clips the file is that of the whole way from latents, of pictures that from frames alone."""
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
    return {name: _time_ms(call, case.repeats).rounded() for name, call in calls.items()}


def _time_ms(call: Callable[[], object], repeats: int) -> Spread:
    times_ms = []
    for _ in range(WARM_UP + repeats):
        start_s = time.perf_counter()
        call()
        _synchronize()
        times_ms.append(1000 * (time.perf_counter() - start_s))
    return Spread.of(times_ms[WARM_UP:])


def _synchronize() -> None:
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)


def _peak_gib(case: Case, num_devices: int) -> dict[str, list[float]]:
    """The most that this process held on each device."""
    if case.kind != "cuda":
        return {}
    return {"peak_gib": [round(torch.cuda.max_memory_allocated(name) / 2**30, 2) for name in case.names(num_devices)]}


def _alike_db(frames_FHWC: NDArray[np.uint8], others_FHWC: NDArray[np.uint8]) -> float:
    """Of 8-bit values; 120 where they are equal."""
    error = np.square(frames_FHWC.astype(np.float32) - others_FHWC).mean(dtype=np.float64)
    return round(float(10 * np.log10(255**2 / max(error, 255**2 / 1e12))), 1)
