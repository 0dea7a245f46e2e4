"""One engine of FLUX.1-dev at full size with random weights: sleep, wake-up, and the first step after it.

The same code runs on every rank. No Ray.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.models import flux
from engines.core.model import Addition, Branch, DenoiserModel, LowRank
from engines.core.resources import rank_resources
from engines.core.weight_memory import WeightMemory
from engines.torch_engine.engine import TorchEngine
from pipelines.blocks.denoiser import as_denoiser
from pipelines.models.flux.spec import SPEC

GIB = 2**30
NUM_STEPS = 4
"""Steps before the first sleep: the first is not captured, the second captures."""
ADDED = "transformer_blocks.0.attn.to_q.weight"
ADDITION = "style"


def cases(arguments: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield one result per precision, of this rank."""
    for precision in arguments.precisions:
        try:
            yield measure(device, precision, arguments)
        except Exception as error:
            yield {"precision": precision, "error": repr(error)}


def measure(device: torch.device, precision: str, arguments: argparse.Namespace) -> dict[str, Any]:
    gc.collect()  # the engine of the case before
    memory = rank_resources().get(WeightMemory)
    if not memory.is_open:
        memory.open(device, Path(tempfile.gettempdir()))
    begun_s = time.perf_counter()
    engine, branches = make(memory, device, precision, arguments)
    try:
        before = [step(engine, branches) for _ in range(NUM_STEPS)][-1]
        added = tuple(replace(branch, additions=((ADDITION, 1.0),)) for branch in branches)
        before_added = step(engine, added)
        times = {"made_s": time.perf_counter() - begun_s}
        times |= {"step_s": timed_s(device, lambda: step(engine, branches))}
        awake = used_gib(device)
        times |= pinned(memory, arguments)
        rounds = []
        for _ in range(arguments.rounds):
            step(engine, added)  # asleep with an addition in the weights
            rounds.append(round_trip(memory, engine, branches, device, before))
        same_added = bool(torch.equal(step(engine, added), before_added))
        return {
            "precision": precision,
            "num_ranks": arguments.num_ranks,
            "weights_gib": memory.use().weights / GIB,
            **times,
            "used_gib_awake": awake,
            **summary(rounds),
            "copies_to_host": memory.num_copies,
            "same_bits": all(one["same_bits"] for one in rounds) and same_added,
            "control_differs": not torch.equal(before, before_added),
        }
    finally:
        engine.close()


def pinned(memory: WeightMemory, arguments: argparse.Namespace) -> dict[str, float]:
    """Pin host memory and wait for it."""
    begun_s = time.perf_counter()
    memory.reserve(None if arguments.pinned_gib is None else int(arguments.pinned_gib * GIB))
    pinned_gib = memory.use().pinned / GIB
    return {"pin_s": time.perf_counter() - begun_s, "pinned_gib": pinned_gib}


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the first sleep, which copies, and the medians of later sleeps and of all else."""
    return {
        "used_gib_asleep": rounds[-1]["used_gib_asleep"],
        "first_sleep_s": rounds[0]["sleep_s"],
        "sleep_s": median(one["sleep_s"] for one in rounds[1:] or rounds),
        "wake_s": median(one["wake_s"] for one in rounds),
        "first_step_s": median(one["first_step_s"] for one in rounds),
    }


def make(
    memory: WeightMemory, device: torch.device, precision: str, arguments: argparse.Namespace
) -> tuple[TorchEngine, tuple[Branch, ...]]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with memory.region():
        module = flux.build(device, dtype, small=arguments.small)
    memory.hold(module)
    plain = as_denoiser({"transformer": module}, SPEC, module.config, probe=tuple)
    model: DenoiserModel = replace(plain, additions={ADDITION: addition(module)})
    engine = TorchEngine(model, strategy=arguments.strategy, precision=precision)
    return engine, (Branch(inputs=flux.inputs(module, arguments.side)),)


def addition(module: torch.nn.Module) -> Addition:
    rows, columns = module.get_parameter(ADDED).shape
    generator = torch.Generator().manual_seed(2)
    up_NR, down_RK = torch.randn(rows, 4, generator=generator), torch.randn(4, columns, generator=generator)
    return {"transformer": {ADDED: LowRank(up_NR=up_NR, down_RK=down_RK, scale=0.01)}}


def round_trip(
    memory: WeightMemory, engine: TorchEngine, branches: tuple[Branch, ...], device: torch.device, before: Tensor
) -> dict[str, Any]:
    synchronize(device)
    sleep_s = memory.sleep()
    asleep = used_gib(device)
    meet()
    wake_s = memory.wake()
    meet()
    begun_s = time.perf_counter()
    after = step(engine, branches)
    synchronize(device)
    first_step_s = time.perf_counter() - begun_s
    same = bool(torch.equal(before, after))
    return {
        "sleep_s": sleep_s,
        "wake_s": wake_s,
        "first_step_s": first_step_s,
        "used_gib_asleep": asleep,
        "same_bits": same,
    }


def step(engine: TorchEngine, branches: tuple[Branch, ...]) -> Tensor:
    ranks = tuple(range(dist.get_world_size())) if dist.is_initialized() else (0,)
    return engine.predict(branches, ranks)[0]


def timed_s(device: torch.device, run: Any, num: int = 5) -> float:
    synchronize(device)
    begun_s = time.perf_counter()
    for _ in range(num):
        run()
    synchronize(device)
    return (time.perf_counter() - begun_s) / num


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def used_gib(device: torch.device) -> float | None:
    """Memory of the whole device in use, by the driver; None on a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) / GIB


def machine() -> dict[str, Any]:
    """Return the GPUs of the host and the version of torch."""
    query = ["nvidia-smi", "--query-gpu=name,pcie.link.gen.current,pcie.link.width.current", "--format=csv,noheader"]
    try:
        gpus = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")
    except OSError:
        gpus = []
    return {"gpus": [gpu for gpu in gpus if gpu], "torch": torch.__version__}
