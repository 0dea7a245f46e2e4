"""How long a gang takes to be ready: from the start of its processes to the first captured step.

    torchrun --nproc_per_node 4 -m benchmarks.denoise_step.start [--side 1024] [--out FILE]

In the order of a gang's ranks: torch is imported, the communicator made, the early start begun (in a thread), and the
model's library imported meanwhile. FLUX.1-dev, random weights, whose making is timed apart. Run it twice to see what
the caches save: Triton's, Inductor's and Python's bytecode (TRITON_CACHE_DIR, TORCHINDUCTOR_CACHE_DIR, and
PYTHONPYCACHEPREFIX without PYTHONDONTWRITEBYTECODE). The last line is one JSON document.
"""

from __future__ import annotations

import time

START_S = time.perf_counter()

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
from pathlib import Path  # noqa: E402
from types import SimpleNamespace  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

# What needs torch alone. All else is imported in main().
from benchmarks.distributed import start_distributed  # noqa: E402
from benchmarks.timing import rank_synchronize  # noqa: E402
from engines.parallel.early_start import start_early  # noqa: E402


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=1024)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    marks = {"torch": time.perf_counter()}
    rank, world, device = join()
    marks["communicator"] = time.perf_counter()
    start_early(device)

    from benchmarks.models import flux
    from benchmarks.models.flux_denoiser import as_denoiser
    from engines.core.model import Branch, Schedule
    from engines.torch_engine.load import load_torch_engine

    marks["imports"] = time.perf_counter()
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    module = flux.build(device, dtype, small=not on_gpu)
    marks["weights"] = time.perf_counter()  # no exchange up to here: the thread has its own under way
    context: Any = SimpleNamespace(rank=rank)
    engine = load_torch_engine(as_denoiser(module), context)
    mark(marks, "engine made and checked")
    inputs = flux.inputs(module, arguments.side, text=flux.TEXT_TOKENS if on_gpu else 64)
    timesteps_S = torch.linspace(1, 0.1, 28, device=device).to(dtype)
    schedule = Schedule.of(timesteps_S, 0)
    branches = (Branch(inputs={**inputs, "timestep": timesteps_S[:1]}, schedule=schedule),)
    engine.predict(branches, tuple(range(world)))
    mark(marks, "first step")
    engine.predict(branches, tuple(range(world)))
    mark(marks, "first captured step")
    if rank == 0:
        report(marks, engine.division.team(tuple(range(world))).spec.name, arguments.out)
    rank_synchronize()
    os._exit(0)  # graphs hold the communicator: an orderly shutdown would wait for them


def join() -> tuple[int, int, torch.device]:
    """Rank, number of ranks, device; the communicator has proved itself, as a gang's does."""
    rank, world = start_distributed()
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if world > 1:
        total = torch.ones(1, device=device)
        dist.all_reduce(total)
        assert total.item() == world
    return rank, world, device


def mark(marks: dict[str, float], name: str) -> None:
    rank_synchronize()
    marks[name] = time.perf_counter()


def report(marks: dict[str, float], strategy: str, out: Path | None) -> None:
    took, last_s = {}, START_S
    for name, at_s in marks.items():
        took[name] = round(at_s - last_s, 2)
        last_s = at_s
    total_s = round(last_s - START_S - took["weights"], 2)
    print(f"{total_s} s to the first captured step, weights aside: {took}", flush=True)
    document = json.dumps({"total_without_weights_s": total_s, "took_s": took, "strategy": strategy})
    if out:
        out.write_text(document)
    print(document, flush=True)


if __name__ == "__main__":
    main()
