"""One model without its encoders: begin, steps and decoding in this process, or in those that ``torchrun`` starts.

    python -m benchmarks.sweep.lone MODEL [--steps 6] [--size 1024x1024] [--frames 33] [--lock FILE]

For models whose text encoders are not known here. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.models.folders import write_vae
from benchmarks.models.published import SEED, PublishedModel
from benchmarks.results import in_gib
from benchmarks.sweep.loop import SweepRequest, turn_of
from benchmarks.sweep.result_file import DECODE_ERROR
from benchmarks.timing import highest_bytes, rank_synchronize, start_distributed
from engines.torch_engine.engine import TorchEngine
from pipelines.blocks.blank import blank_conditioning
from pipelines.blocks.sampler import BlocksSampler
from pipelines.checkpoint import Checkpoint
from pipelines.request import MediaRequest


@torch.no_grad()
def measured(
    name: str, settings: SweepRequest, device: torch.device, dtype: torch.dtype, turn: AbstractContextManager[Any]
) -> dict[str, Any]:
    """Measure ``name``, a published model or a folder. All ranks make the call; the first one decodes.

    All timed work happens inside ``turn``, which the first rank takes.
    """
    defaults = Checkpoint.of_configuration(name).defaults
    size = settings.size_of(defaults)
    model = PublishedModel.made(name, device, dtype, size)
    request = defaults.request(size, num_inference_steps=settings.steps_of(defaults))
    engine, weights_bytes = TorchEngine(model.denoiser(), strategy="ulysses"), highest_bytes(device, anew=True)
    with turn:
        first, second, again = (Job.run(model, request, engine) for _ in range(3))
    found = {
        "through": "transformer and decoder",
        "size": str(size),
        "steps": len(first.steps_ms),
        "first_ms": {"begin": first.begin_ms, "step": first.steps_ms[0]},
        "step_ms": round(min(again.steps_ms), 1),
        "captured": engine.num_captured > 0 and engine.was_warm,
        "same_bytes": first.equals(again) and second.equals(again),
        "same_bytes_once_warm": second.equals(again),
        "gpu_gib": {"highest": in_gib(highest_bytes(device)), "weights": in_gib(weights_bytes)},
    }
    engine.close()
    del model, engine
    gc.collect()
    torch.cuda.empty_cache()
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    return found | (decoded(name, again.latents, request, device, dtype) if is_first else {})


class Job:
    """One job's times in milliseconds, and the latents after its last step."""

    def __init__(self, begin_ms: float, steps_ms: Sequence[float], latents: Mapping[str, Any]) -> None:
        self.begin_ms, self.steps_ms, self.latents = begin_ms, steps_ms, latents

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {key: x for key, x in self.latents.items() if isinstance(x, Tensor)}

    def equals(self, other: Job) -> bool:
        return all(torch.equal(x, other.tensors[key]) for key, x in self.tensors.items())

    @classmethod
    def run(cls, model: PublishedModel, request: MediaRequest, engine: TorchEngine) -> Job:
        sampler, ranks = BlocksSampler(model.opened), tuple(range(engine.team_sizes[-1]))
        noise = torch.Generator().manual_seed(SEED)
        times = [time.perf_counter()]
        state = sampler.begin(request, blank_conditioning(model.opened, request, model.num_tokens, noise))
        rank_synchronize()
        times.append(time.perf_counter())
        for _ in range(sampler.num_steps(state)):
            state = sampler.advance(state, engine.predict(sampler.branches(state), ranks))
            rank_synchronize()
            times.append(time.perf_counter())
        begin_ms, *steps_ms = (round(1e3 * (end - start), 1) for start, end in pairwise(times))
        return cls(begin_ms, steps_ms, sampler.latents(state))


def decoded(
    name: str, latents: Mapping[str, Any], request: MediaRequest, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Return time and memory of a second decode, or the reason why decoding failed."""
    with tempfile.TemporaryDirectory(prefix="troupe_sweep_", dir="/tmp") as scratch:
        try:
            folder = Path(name) if Path(name).is_dir() else Path(scratch) / "vae"
            if not folder.exists():
                write_vae(name, folder, device)
            decoder = Checkpoint(folder, device, dtype).decoder()
            before_bytes = highest_bytes(device, anew=True)
            for _ in range(2):
                start_s = time.perf_counter()
                decoder.decode(latents, request)
            decode_ms = round(1e3 * (time.perf_counter() - start_s), 1)
            return {"decode_ms": decode_ms, "decode_gib": in_gib(highest_bytes(device) - before_bytes)}
        except Exception as error:  # the steps tell something without it
            return {DECODE_ERROR: f"{type(error).__name__}: {error}"[:1000]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    SweepRequest.add_options(parser)
    arguments = parser.parse_args()
    rank, _ = start_distributed()
    on_gpu = torch.cuda.is_available()
    device, dtype = (torch.device("cuda", rank), torch.bfloat16) if on_gpu else (torch.device("cpu"), torch.float32)
    turn = turn_of(arguments.lock) if rank == 0 else nullcontext()
    found = measured(arguments.model, SweepRequest.of(arguments), device, dtype, turn)
    if rank == 0:
        print(json.dumps(found), flush=True)
    os._exit(0)  # graphs hold the communicator: an orderly shutdown would wait for them


if __name__ == "__main__":
    main()
