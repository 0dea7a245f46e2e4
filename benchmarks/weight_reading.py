"""Times of reading a transformer's weights onto the ranks of a host: each rank for itself, and all ranks together.

    torchrun --nproc-per-node 2 -m benchmarks.weight_reading FOLDER [--rounds 3]

Files are read once before, so they come out of the page cache. Ways take turns in each round. Ranks use GPUs and NCCL,
or CPUs and Gloo. The status is 1 if ranks that read together have other bits. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.timing import start_distributed
from engines.core.engine import RankContext
from engines.parallel.collectives import Axis
from engines.parallel.early_start import host_axis
from engines.parallel.file_reading import SpanReader
from engines.parallel.mesh import ALONE
from engines.parallel.weight_files import files_of
from pipelines.gpu_weights import read_spans

GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="in diffusers' layout")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    rank, num_ranks = start_distributed()
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    context = RankContext(rank=rank, num_ranks=num_ranks, device=str(device))
    axes = {"each": ALONE} | ({"together": host_axis(context)} if num_ranks > 1 else {})
    folder = arguments.folder / "transformer"
    files = files_of(folder)
    if not files:
        raise SystemExit(f"{folder} has no weights in diffusers' layout")
    document = measure(files, device, axes, arguments.rounds)
    if rank == 0:
        report(document, device, num_ranks)
    if num_ranks > 1:
        dist.destroy_process_group()
    sys.exit(0 if document["same_bits"] else 1)


def measure(files: tuple[Path, ...], device: torch.device, axes: dict[str, Axis], num_rounds: int) -> dict[str, Any]:
    """Return the times of each way in all rounds, the first of which is a warm-up, and whether their bits agree."""
    rounds: dict[str, list[dict[str, float]]] = {way: [] for way in axes}
    sums: set[tuple[int, ...]] = set()
    for _ in range(1 + num_rounds):
        for way, axis in axes.items():
            one, tensors = read(files, device, axis)
            rounds[way].append(one)
            sums.add(checksums(tensors))
    num_bytes = sum(x.nbytes for x in tensors.values())
    ways = {way: {key: median(one[key] for one in all_of[1:]) for key in all_of[0]} for way, all_of in rounds.items()}
    return {"num_bytes": num_bytes, "same_bits": len(sums) == 1, "ways": ways, "rounds": rounds}


def read(files: tuple[Path, ...], device: torch.device, axis: Axis) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Read all files. Return the seconds until every rank has them, those of this rank's parts, and the tensors."""
    meet(device)
    begun_s = time.perf_counter()
    tensors: dict[str, Tensor] = {}
    with SpanReader(device, axis) as reader:
        for number, file in enumerate(files):
            tensors |= {f"{number}/{name}": x for name, x in read_spans(file, reader).items()}
    meet(device)
    times = {"took_s": time.perf_counter() - begun_s, "read_s": reader.read_s, "exchange_s": reader.exchange_s}
    return times, tensors


def checksums(tensors: dict[str, Tensor]) -> tuple[int, ...]:
    """Return a sum of the bytes of each tensor, every byte weighted by its place, modulo 2^64."""
    return tuple(_checksum(x.view(-1).view(torch.uint8)) for x in tensors.values())


def _checksum(x_B: Tensor) -> int:
    total, chunk = 0, 2**26
    for begin in range(0, x_B.numel(), chunk):
        part = x_B[begin : begin + chunk].long()
        places = torch.arange(begin + 1, begin + 1 + part.numel(), device=part.device)
        total += int((part * places).sum())
    return total


def meet(device: torch.device) -> None:
    """Wait for the device and for all ranks."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if dist.is_initialized():
        dist.barrier()


def report(document: dict[str, Any], device: torch.device, num_ranks: int) -> None:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} cores"
    print(f"{num_ranks} ranks, {name}, torch {torch.__version__}, {document['num_bytes'] / GIB:.2f} GiB")
    print(f"{'':<10}{'all ranks':>10}{'own read':>10}{'exchange':>10}   GiB/s a rank")
    for way, one in document["ways"].items():
        rate = document["num_bytes"] / GIB / one["took_s"]
        print(f"{way:<10}{one['took_s']:>9.3f}s{one['read_s']:>9.3f}s{one['exchange_s']:>9.3f}s{rate:>15.2f}")
    print(json.dumps({"hardware": name, "torch": torch.__version__, "num_ranks": num_ranks, **document}))


if __name__ == "__main__":
    main()
