"""Milliseconds per forward of published transformers (random weights), beside diffusers on the same weights.

    python -m benchmarks.model_step [MODEL ...]                              one GPU
    torchrun --nproc_per_node 2 -m benchmarks.model_step [MODEL ...]         two GPUs

Of diffusers: eager, and its blocks compiled, with cuDNN's attention; on several GPUs its Ulysses, after which a process
can time nothing else. Ours is the engine as a gang calls it. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.denoise_step.profile import NUM_STEPS, show
from benchmarks.distributed import start_distributed
from benchmarks.models.published import PublishedModel
from benchmarks.timing import Times, measure, rank_synchronize
from engines.parallel.self_check import relative_difference
from engines.torch_engine.engine import TorchEngine

MODELS = ("Z-Image-Turbo", "Qwen-Image", "FLUX.2-klein-4B", "FLUX.2-dev")
BF16_TFLOPS = 790.0
"""What an H200 reaches in a large bf16 product on random data."""
MAX_ERROR = 0.05
"""In bf16 sums in another order differ."""
MAX_FP8_ERROR = 0.2
CUDNN = "_native_cudnn"


@torch.no_grad()
def main() -> None:
    arguments = parse()
    rank, world = start_distributed()
    device = torch.device("cuda", rank)
    say = print if rank == 0 else (lambda *_, **__: None)
    hardware = f"{world} x {torch.cuda.get_device_name(device)}"
    say(f"{hardware}, torch {torch.__version__}", flush=True)
    document: dict[str, Any] = {"hardware": hardware, "torch": torch.__version__, "results": []}
    for name in arguments.models:
        try:
            model = PublishedModel.made(name, device, torch.bfloat16, arguments.side, arguments.tokens)
            for result in results_of(model, arguments, world):
                say(json.dumps(result), flush=True)
                document["results"].append(result)
                if rank == 0 and arguments.out:
                    arguments.out.write_text(json.dumps(document))
        except Exception:
            say(f"{name}: failed\n{traceback.format_exc()[-3000:]}", flush=True)
        model = None  # type: ignore[assignment]
        torch._dynamo.reset()
        torch.cuda.empty_cache()
        rank_synchronize()
    say(json.dumps(document), flush=True)
    os._exit(0)  # graphs hold the communicator: an orderly shutdown would wait for them


def results_of(model: PublishedModel, arguments: Arguments, world: int) -> Any:
    floor_ms = model.flop() / BF16_TFLOPS / 1e9 / world
    said = {"model": model.name, "side": arguments.side, "tokens": arguments.tokens, "ranks": world}
    said |= {"precision": arguments.precision, "floor_ms": round(floor_ms, 1)}
    reference = model.call()
    if "eager" in arguments.makers:
        yield {**said, "maker": "diffusers eager", **timed(model.call, arguments.repeats)}
    if "diffusers" in arguments.makers:
        yield {**said, "maker": "diffusers compiled", **diffusers(model, reference, world, arguments.repeats)}
    for maker, fast in (("ours compiled", False), ("ours", None)):
        if maker in arguments.makers:
            yield {**said, "maker": f"{maker}, {arguments.strategy}", **ours(model, reference, arguments, world, fast)}


def diffusers(model: PublishedModel, reference: Tensor, world: int, repeats: int) -> dict[str, Any]:
    """Its blocks compiled; the module is as it was afterwards, but on several GPUs, where hooks stay."""
    model.module.set_attention_backend(CUDNN)
    if world > 1:
        from diffusers import ContextParallelConfig

        model.module.enable_parallelism(config=ContextParallelConfig(ulysses_degree=world))
    model.module.compile_repeated_blocks(dynamic=False, fullgraph=False)
    try:
        with torch.inference_mode():
            error = relative_difference(model.call(), reference)
            return {**timed(model.call, repeats), "error": float(f"{error:.2e}")}
    finally:
        for part in model.module.modules():
            part._compiled_call_impl = None


def ours(
    model: PublishedModel, reference: Tensor, arguments: Arguments, world: int, fast: bool | None
) -> dict[str, Any]:
    """Hand-ordered where there is such a step, unless ``fast`` is False: then the module, its blocks compiled."""
    engine = TorchEngine(model.denoiser(), strategy=arguments.strategy, precision=arguments.precision, fast=fast)
    ranks = tuple(range(world))
    engine.warm_up((model.branch,), ranks)

    def step() -> Tensor:
        return engine.predict((model.branch,), ranks)[0]

    error = relative_difference(step(), reference)
    assert error < (MAX_ERROR if arguments.precision == "native" else MAX_FP8_ERROR), (
        f"wrong answer: relative error {error:.3f}"
    )
    times = timed(step, arguments.repeats)
    if arguments.profile and not (dist.is_initialized() and dist.get_rank()):
        profiled(model.name, step)
    engine.close()
    return {**times, "error": float(f"{error:.2e}")}


def timed(step: Callable[[], object], repeats: int) -> dict[str, Any]:
    times: Times = measure(step, repeats=repeats)
    return {name: round(value, 2) for name, value in asdict(times).items() if value is not None}


def profiled(name: str, step: Callable[[], object]) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(NUM_STEPS):
            step()
        torch.cuda.synchronize()
    show(name, profiler)


class Arguments(argparse.Namespace):
    models: tuple[str, ...]
    side: int
    tokens: int
    repeats: int
    makers: tuple[str, ...]
    strategy: str
    precision: str
    profile: bool
    out: Path | None


def parse() -> Arguments:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--side", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=512, help="of the prompt")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--makers", nargs="+", default=("eager", "diffusers", "ours"))
    parser.add_argument("--strategy", default="ulysses")
    parser.add_argument("--precision", default="native", help="of ours")
    parser.add_argument("--profile", action="store_true", help="one rank alone: where ours spends its time")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(sys.argv[1:], namespace=Arguments())


if __name__ == "__main__":
    main()
