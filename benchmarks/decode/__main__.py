"""Times of a published auto-encoder at full size (random weights), on one GPU and on several of one process.

    python -m benchmarks.decode [MODEL] [--size 2048x2048] [--devices 1 2] [--memory-gib GIB] [--repeats 5] [--out FILE]
    python -m benchmarks.decode Wan2.1-T2V-14B --size 832x480x81 --devices 1 2
    python -m benchmarks.decode clip [MODEL] [--size 832x480x49] [--devices 1 2 4]   (by phase, ``clip.py``)

Times are those of pixels on the device, of frames in memory and of a file. "alike_db" compares the frames with those of
the first number of devices. Without GPUs all runs on the CPU. The last line is one JSON document.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.decode import clip
from benchmarks.decode.case import Case, alike_db, ceiling, run, time_ms
from deployments.stages.common import Workers
from deployments.stages.vae_decoder import NUM_ENCODINGS, ClipFinisher
from engines.core.parcel import Parcel
from pipelines.blocks.decoder import BlocksDecoder
from pipelines.media.encode import encode_frames
from pipelines.size import Size


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


def _peak_gib(case: Case, num_devices: int) -> dict[str, list[float]]:
    """Return the highest memory of this process on each device."""
    if case.kind != "cuda":
        return {}
    return {"peak_gib": [round(torch.cuda.max_memory_allocated(name) / 2**30, 2) for name in case.names(num_devices)]}


def main() -> None:
    if sys.argv[1:2] == ["clip"]:
        run(clip.phases, clip.__doc__, "Wan2.2-TI2V-5B", Size(width=832, height=480, num_frames=49), sys.argv[2:])
    else:
        run(decodings, __doc__, "FLUX.1-dev", Size(width=2048, height=2048), sys.argv[1:])


if __name__ == "__main__":
    main()
