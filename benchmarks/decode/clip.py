"""Times from a clip's latents to its MP4 by phase, for a published auto-encoder at full size (random weights).

    python -m benchmarks.decode clip [MODEL] [--size 832x480x49] [--devices 1 2 4] [--repeats 5] [--out FILE]

Random weights make noise, which takes an encoder several times as long as a video. So encoding is also timed with
"moving" frames: a landscape that drifts, with grain.

- "encoding": phases of the host, the same on any number of devices. RGB to YUV in one thread, all groups in one thread,
  the last group with its threads, and the file with a thread for each group.
- "decoding": until the host has issued the auto-encoder's work, until its pixels are there, pixels to 8 bits and to the
  host, of that the copy, all of this chunk by chunk, and the file, with all phases overlapped as they are served.

The last line is one JSON document. Without GPUs all runs on the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from benchmarks.decode.case import Case, alike_db, ceiling, time_ms
from deployments.stages.common import Workers
from deployments.stages.vae_decoder import MAX_THREADS, NUM_ENCODINGS, ClipFinisher
from engines.core.parcel import Parcel
from pipelines.blocks.decoder import BlocksDecoder, DecodedMedia, to_frames
from pipelines.media.clip import NUM_LAST_THREADS, encode_clip, encode_group, group_length, video_frames
from pipelines.request import MediaRequest

Frames = NDArray[np.uint8]
SPEED = 4
"""Pixels that moving frames drift from one to the next."""
GRAIN = 1.5
"""Standard deviation of their grain, of 255."""


class MovingDecoder:
    """Decodes as ``decoder`` does, and returns other frames of the same number."""

    def __init__(self, decoder: BlocksDecoder, frames_FHWC: Frames) -> None:
        self._decoder, self._frames_FHWC = decoder, frames_FHWC

    def decode_chunks(self, latents: Mapping[str, Any], request: MediaRequest) -> Iterator[DecodedMedia]:
        first = 0
        for media in self._decoder.decode_chunks(latents, request):
            last = first + len(media.frames_FHWC)
            yield replace(media, frames_FHWC=self._frames_FHWC[first:last])
            first = last


def phases(case: Case, counts: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield the ceiling, the times of encoding by content, and those of decoding by number of devices."""
    if case.request.kind != "video":
        raise ValueError(f"{case.folder.name} makes pictures: choose a model of clips, or leave out the word clip")
    first_FHWC: Frames | None = None
    for count in counts:
        decoder = case.decoder(count)
        frames_FHWC = decoder.decode(case.latents, case.request)
        moving_FHWC = moving_frames(*frames_FHWC.shape[:3])
        if first_FHWC is None:
            first_FHWC = frames_FHWC
            yield ceiling(case, decoder)
            for name, some_FHWC in (("moving", moving_FHWC), ("decoded", frames_FHWC)):
                yield {"encoding": name, **_encoding(some_FHWC, case)}
        times = _decoding(case, decoder, moving_FHWC)
        yield {"num_devices": count, **times, "alike_db": alike_db(frames_FHWC, first_FHWC)}


def _encoding(frames_FHWC: Frames, case: Case) -> dict[str, Any]:
    length, fps = group_length(len(frames_FHWC)), case.request.fps
    starts = range(0, len(frames_FHWC), length)

    def group(start: int, num_threads: int = 1) -> Any:
        return encode_group(list(frames_FHWC[start : start + length]), start, fps, num_threads)

    num_threads = min(MAX_THREADS, os.cpu_count() or 1)
    calls: dict[str, Callable[[], object]] = {
        "yuv_ms": lambda: list(video_frames(frames_FHWC)),
        "groups_ms": lambda: list(map(group, starts)),
        "last_group_ms": lambda: group(starts[-1], NUM_LAST_THREADS),
        "file_ms": lambda: encode_clip(frames_FHWC, fps, num_threads=num_threads),
    }
    times = {name: time_ms(call, case.repeats).rounded() for name, call in calls.items()}
    num_bytes = len(encode_clip(frames_FHWC, fps, num_threads=num_threads))
    return {"num_groups": len(starts), "num_threads": num_threads, "num_bytes": num_bytes, **times}


def _decoding(case: Case, decoder: BlocksDecoder, moving_FHWC: Frames) -> dict[str, Any]:
    pixels_FCHW = decoder.pixels(case.latents)
    bytes_FHWC = torch.empty(moving_FHWC.shape, dtype=torch.uint8, device=pixels_FCHW.device)
    parcel = Parcel.of(case.latents)

    def file(source: Any) -> Callable[[], object]:
        finisher = ClipFinisher(source, Workers(1, "decoding"), Workers(NUM_ENCODINGS, "encoding"))
        return lambda: finisher.finish(parcel, case.request)

    calls: dict[str, Callable[[], object]] = {
        "vae_ms": lambda: decoder.pixels(case.latents),
        "to_frames_ms": lambda: to_frames(pixels_FCHW, case.request),
        "copy_ms": bytes_FHWC.cpu,
        "chunks_ms": lambda: list(decoder.decode_chunks(case.latents, case.request)),
        "file_ms": file(decoder),
        "moving_file_ms": file(MovingDecoder(decoder, moving_FHWC)),
    }
    issue_ms = time_ms(calls["vae_ms"], case.repeats, waits=False).rounded()
    return {"issue_ms": issue_ms, **{name: time_ms(call, case.repeats).rounded() for name, call in calls.items()}}


def moving_frames(num_frames: int, height: int, width: int) -> Frames:
    """Return a landscape of two scales that drifts to the left, with grain."""
    rng, margin = np.random.default_rng(0), SPEED * num_frames

    def layer(scale: int) -> NDArray[np.float32]:
        sides = (height // scale + 2, (width + margin) // scale + 2, 3)
        picture = Image.fromarray(rng.integers(0, 256, sides, dtype=np.uint8))
        return np.asarray(picture.resize((width + margin, height), Image.Resampling.BICUBIC), np.float32)

    landscape_HWC = 0.75 * layer(40) + 0.25 * layer(6)
    shifted = (landscape_HWC[:, SPEED * index : SPEED * index + width] for index in range(num_frames))
    grainy = (part_HWC + GRAIN * rng.standard_normal(part_HWC.shape, np.float32) for part_HWC in shifted)
    return np.stack([part_HWC.round().clip(0, 255).astype(np.uint8) for part_HWC in grainy])
