"""Seconds from a clip's latents to its MP4, as served: decoder as written and prepared, on one GPU or several.

    python -m benchmarks.clip_decode Wan2.2-TI2V-5B --size 832x480x49 [--rounds 5] [--devices 1]

The published auto-encoder has random weights, whose pixels are noise, which no clip is. So the encoder of H.264 gets
smooth moving frames in their place, when the decoder has made them. The first round is a warm-up. The last line is one
JSON document.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.models.folders import write_vae
from benchmarks.results import Spread, in_gib
from benchmarks.timing import highest_bytes
from pipelines.blocks.decoder import BlocksDecoder
from pipelines.checkpoint import Checkpoint
from pipelines.media.clip import ClipEncoder
from pipelines.media.encode import MAX_GROUPS
from pipelines.request import MediaRequest
from pipelines.size import Size

NUM_THREADS = min(MAX_GROUPS, os.cpu_count() or 1)
"""Threads that encode groups of pictures, as in the decoder's process."""
WAYS = {"as written": False, "prepared": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a published model of clips")
    parser.add_argument("--size", default="832x480x49", help="width x height x frames")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--devices", type=int, default=1, help="GPUs that decode together")
    arguments = parser.parse_args()
    width, height, num_frames = map(int, arguments.size.split("x"))
    device = torch.device("cuda")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / arguments.model
        write_vae(arguments.model, path, device)
        checkpoint = Checkpoint(path, device, torch.bfloat16)
        size = Size(width=width, height=height, num_frames=num_frames)
        others = tuple(f"cuda:{number}" for number in range(1, arguments.devices))
        document = measure(checkpoint, size, arguments.rounds, others)
    hardware = f"{arguments.devices} x {torch.cuda.get_device_name()}, {len(os.sched_getaffinity(0))} cores"
    print(json.dumps({"model": arguments.model, "hardware": hardware, "torch": torch.__version__, **document}))


def measure(checkpoint: Checkpoint, size: Size, num_rounds: int, others: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return seconds of each way, and how far its pixels are from those as written (relative 2-norm)."""
    request = checkpoint.defaults.request(size, prompt="a red circle")
    latents, results, expected = checkpoint.first_latents(request), dict[str, Any](), torch.empty(0)
    frames_FHWC = moving_frames(request)
    for way, compiled in WAYS.items():
        highest_bytes(checkpoint.device, anew=True)
        decoder = checkpoint.decoder(compiled=compiled, others=others)
        rounds = [to_mp4(decoder, latents, request, frames_FHWC) for _ in range(1 + num_rounds)][1:]
        spreads = {key: Spread.of([one[key] for one in rounds]) for key in rounds[0]}
        pixels = torch.from_numpy(decoder.decode(latents, request)).float()
        expected = expected if compiled else pixels
        results[way] = {key: spread.rounded() for key, spread in spreads.items()}
        results[way]["peak_gib"] = in_gib(highest_bytes(checkpoint.device))
        results[way]["difference"] = float(f"{(pixels - expected).norm() / expected.norm():.2e}")
        print(f"{way:<12}{'  '.join(f'{key} {spread}' for key, spread in spreads.items())}", flush=True)
        del decoder
        gc.collect()
    return {"size": str(size), "results": results}


def to_mp4(
    decoder: BlocksDecoder, latents: Any, request: MediaRequest, frames_FHWC: NDArray[np.uint8]
) -> dict[str, float]:
    """Return the seconds until the last frame is decoded, and until the file is there."""
    begun_s, num_frames = time.perf_counter(), 0
    with (
        ThreadPoolExecutor(NUM_THREADS) as workers,
        ClipEncoder(request.num_frames, request.fps, workers, 2 * NUM_THREADS) as clip,
    ):
        for media in decoder.decode_chunks(latents, request):
            end = num_frames + len(media.frames_FHWC)
            clip.add(frames_FHWC[num_frames:end])
            num_frames = end
        decoded_s = time.perf_counter() - begun_s
        clip.finish()
    return {"decode_s": decoded_s, "mp4_s": time.perf_counter() - begun_s}


def moving_frames(request: MediaRequest) -> NDArray[np.uint8]:
    """Return a clip of moving waves with a little grain."""
    y, x = np.mgrid[: request.height, : request.width]
    generator = np.random.default_rng(0)
    frames = np.empty((request.num_frames, request.height, request.width, 3), np.uint8)
    for number, frame_HWC in enumerate(frames):
        waves = [90 * np.sin((x + 5 * number) / 23) * np.cos((y - 3 * number) / 31 + colour) for colour in range(3)]
        grain = generator.normal(0, 2, frame_HWC.shape)
        frame_HWC[:] = (128 + np.stack(waves, -1) + grain).clip(0, 255)
    return frames


if __name__ == "__main__":
    main()
