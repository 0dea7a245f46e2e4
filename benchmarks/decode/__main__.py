"""A published auto-encoder at full size (random weights), on one GPU and on several of one process.

    python -m benchmarks.decode [MODEL] [--size 2048x2048] [--devices 1 2] [--memory-gib GIB] [--repeats 5] [--out FILE]

``python -m benchmarks.decode Wan2.1-T2V-14B --size 832x480x81 --devices 1 2`` is for clips. Beside times of pixels on
the device, of frames in memory and of a file there is how far the frames are from those of the first number of devices.
Without GPUs all is on the CPU. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.decode.cases import Case, decodings
from benchmarks.models.folders import write_vae
from benchmarks.results import tell
from pipelines.size import Size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="FLUX.1-dev")
    parser.add_argument("--size", type=Size.parse, default=Size(width=2048, height=2048))
    parser.add_argument("--devices", type=int, nargs="+", default=[1, max(1, torch.cuda.device_count())])
    parser.add_argument("--memory-gib", type=float)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the model is, or is written to if nothing is there")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    has_gpus = torch.cuda.is_available()
    document: dict[str, Any] = {
        "model": arguments.model,
        "size": str(arguments.size),
        "hardware": torch.cuda.get_device_name() if has_gpus else platform.processor(),
        "torch": torch.__version__,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.folder or Path(name) / arguments.model
        if not folder.exists():
            write_vae(arguments.model, folder, torch.device("cuda" if has_gpus else "cpu"))
        tell(document, results(arguments, folder, "cuda" if has_gpus else "cpu"), arguments.out)


def results(arguments: argparse.Namespace, folder: Path, kind: str) -> Iterator[dict[str, Any]]:
    """Yields the ceiling, then times for each number of devices."""
    memory_bytes = None if arguments.memory_gib is None else int(arguments.memory_gib * 2**30)
    case = Case(folder=folder, size=arguments.size, kind=kind, memory_bytes=memory_bytes, repeats=arguments.repeats)
    yield from decodings(case, arguments.devices)


if __name__ == "__main__":
    main()
