"""Measures time and bytes that settings and a C2PA manifest add to the files of a picture and a clip, on one CPU core.

    python -m benchmarks.marks CERTIFICATE KEY [--repeats 50] [--out FILE]

Times are of a file without either, of one with settings, and of the signature. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from benchmarks.results import tell
from benchmarks.timing import Times
from pipelines.media import encode_frames
from pipelines.media.metadata import MetadataWriter
from pipelines.media.provenance import Credentials, ManifestWriter
from pipelines.request import MediaKind, MediaRequest
from pipelines.size import Size

CASES = (("png", (1024, 1024), 1), ("jpeg", (1024, 1024), 1), ("webp", (1024, 1024), 1), ("mp4", (832, 480), 49))
FPS = 16
PROMPT = "a small red circle above a large blue square on a white background"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("certificate", type=Path)
    parser.add_argument("key", type=Path)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    document: dict[str, Any] = {"hardware": platform.processor(), "repeats": arguments.repeats}
    tell(document, results(arguments), arguments.out)


def results(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields times and sizes of each format."""
    manifests = ManifestWriter(Credentials.read(arguments.certificate, arguments.key), "Troupe", "0")
    settings = MetadataWriter(level="full", software="Troupe 0", sampler="FlowMatchEulerDiscreteScheduler")
    for format, (width, height), num_frames in CASES:
        request = request_of(format, Size(width=width, height=height), num_frames)
        frames_FHWC = clouds(num_frames, height, width)

        def encode(texts: Any, format: Any = format, frames_FHWC: Any = frames_FHWC) -> bytes:
            return encode_frames(frames_FHWC, format, fps=FPS, texts=texts)

        data = encode(settings.texts(request))
        repeats = arguments.repeats if num_frames == 1 else max(3, arguments.repeats // 10)
        yield {
            "format": format,
            "size": f"{width}x{height}x{num_frames}",
            "plain_ms": milliseconds(lambda encode=encode: encode({}), repeats),
            "settings_ms": milliseconds(lambda encode=encode, one=request: encode(settings.texts(one)), repeats),
            "signature_ms": milliseconds(
                lambda data=data, one=request, format=format: manifests.sign_for(one, data, format), arguments.repeats
            ),
            "plain_bytes": len(encode({})),
            "settings_bytes": len(data) - len(encode({})),
            "manifest_bytes": len(manifests.sign_for(request, data, format)) - len(data),
        }


def request_of(format: str, size: Size, num_frames: int) -> MediaRequest:
    kind: MediaKind = "video" if format == "mp4" else "image"
    return MediaRequest(
        request_id="r",
        model="flux-dev",
        kind=kind,
        prompt=PROMPT,
        width=size.width,
        height=size.height,
        num_frames=num_frames,
        fps=FPS if kind == "video" else 0,
        num_inference_steps=28,
        guidance_scale=3.5,
        true_cfg_scale=1.0,
        seed=7,
    )


def clouds(num_frames: int, height: int, width: int) -> NDArray[np.uint8]:
    """Smooth pictures that move a little, as uint8 (frames, height, width, 3)."""
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    whole = np.asarray(Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC))
    return np.stack([np.roll(whole, 2 * index, axis=1) for index in range(num_frames)])


def milliseconds(work: Callable[[], object], repeats: int) -> dict[str, Any]:
    work()
    values_ms = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        work()
        values_ms.append(1000 * (time.perf_counter() - began_s))
    times = asdict(Times.of(values_ms))
    return {name: round(times[name], 2) for name in ("median_ms", "lowest_ms", "p90_ms")}


if __name__ == "__main__":
    main()
