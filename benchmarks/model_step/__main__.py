"""Milliseconds per forward of published transformers (random weights), beside diffusers on the same weights.

    python -m benchmarks.model_step [MODEL ...]                              one GPU (or a small checkpoint on the CPU)
    torchrun --nproc_per_node 2 -m benchmarks.model_step [MODEL ...]         two GPUs

With ``--branches 2`` both forwards of a guided step are timed, as a job makes them; on two GPUs each can be one's:

    python -m benchmarks.model_step Qwen-Image --branches 2
    torchrun --nproc_per_node 2 -m benchmarks.model_step Qwen-Image --branches 2 --strategies guidance

SGLang's and vLLM-Omni's transformers of FLUX.2, Z-Image, Qwen-Image, Wan and Cosmos 3 are timed where they are
installed, on several GPUs divided as they do it (benchmarks/peers/layout.py):

    python -m benchmarks.model_step Qwen-Image --branches 2 --makers sglang vllm-omni sglang-blocks diffusers ours
    torchrun --nproc_per_node 2 -m benchmarks.model_step Qwen-Image --branches 2 --makers sglang vllm-omni ours

Pictures are of 1024 x 1024 pixels, clips of their models' usual sizes, and both small on a CPU. Of diffusers: eager,
and its blocks compiled, with cuDNN's attention; on several GPUs (on several CPUs it has none) its Ulysses, where it has
a plan, after which a process can time nothing else.
Ours is the engine as a gang calls it, with what is made once a job made before. The last line is one JSON document; the
program ends with 1 if nothing was measured of one of the models.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.denoise_step.profile import NUM_STEPS, show
from benchmarks.distributed import start_distributed
from benchmarks.model_step.errors import relative_error
from benchmarks.model_step.options import Arguments, parse
from benchmarks.models.published import PublishedModel
from benchmarks.peers.published import MAKERS as PEERS
from benchmarks.peers.published import peer_of
from benchmarks.results import status_of
from benchmarks.timing import Times, measure, rank_synchronize
from benchmarks.turns import meeting_of
from engines.torch_engine.engine import TorchEngine
from engines.torch_engine.options import TorchOptions

BF16_TFLOPS = 790.0
"""What an H200 reaches in a large bf16 product on random data."""
MAX_ERROR = 0.05
"""In bf16 sums in another order differ."""
MAX_FP8_ERROR = 0.2
CUDNN = "_native_cudnn"
MOST_SAID = 3000
"""Characters of an error."""


@torch.no_grad()
def main() -> None:
    arguments = parse(sys.argv[1:], __doc__)
    rank, world = start_distributed()
    on_gpu = torch.cuda.is_available()
    device, dtype = (torch.device("cuda", rank), torch.bfloat16) if on_gpu else (torch.device("cpu"), torch.float32)
    say = print if rank == 0 else (lambda *_, **__: None)
    hardware = f"{world} x {torch.cuda.get_device_name(device) if on_gpu else 'CPU'}"
    say(f"{hardware}, torch {torch.__version__}", flush=True)
    document: dict[str, Any] = {"hardware": hardware, "torch": torch.__version__, "results": []}
    arguments.meeting = meeting_of(arguments, rank)
    for name in arguments.models:
        try:
            sizes = (arguments.size, arguments.tokens, arguments.branches, arguments.batch)
            model = PublishedModel.made(name, device, dtype, *sizes)
            said = facts_of(model, world)
            say(", ".join(f"{key} {value}" for key, value in said.items()), flush=True)
            for result in results_of(model, said, arguments, world):
                say(json.dumps(result), flush=True)
                document["results"].append(result)
                if rank == 0 and arguments.out:
                    arguments.out.write_text(json.dumps(document))
        except Exception:
            say(f"{name}: failed\n{traceback.format_exc()[-MOST_SAID:]}", flush=True)
        model = None  # type: ignore[assignment]
        torch._dynamo.reset()
        torch.cuda.empty_cache()
        rank_synchronize()
    if arguments.meeting:
        arguments.meeting.leave()
    say(json.dumps(document), flush=True)
    by_model = ([one for one in document["results"] if one["model"] == name] for name in arguments.models)
    status = max(map(status_of, by_model))
    os._exit(status)  # graphs hold the communicator: an orderly shutdown would wait for them


def facts_of(model: PublishedModel, world: int) -> dict[str, Any]:
    """What is known before anything is timed: the floor is all arithmetic at the rate above, shared by the ranks."""
    flop = model.flop()
    said = {"model": model.name, "size": str(model.size), "tokens": model.num_tokens, "branches": len(model.branches)}
    said["batch"] = model.branch.batch
    tera_flop, floor_ms = round(flop / 1e12, 1), round(flop / BF16_TFLOPS / 1e9 / world, 1)
    return said | {"ranks": world, "tera_flop": tera_flop, "floor_ms": floor_ms}


def results_of(
    model: PublishedModel, said: dict[str, Any], arguments: Arguments, world: int
) -> Iterator[dict[str, Any]]:
    """Yields ``said`` with each maker's times: a round of the meeting for each, where others are met."""
    said = {**said, "precision": arguments.precision}
    reference = model.call()
    own = partial(ours, model, reference, arguments)
    runs: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
        "eager": ("diffusers eager", lambda: timed(model.call, arguments)),
        "diffusers": ("diffusers compiled", lambda: diffusers(model, reference, arguments, world)),
        **{peer: (peer, partial(peer_times, model, reference, arguments, peer)) for peer in PEERS},
    }
    chosen = [run for name, run in runs.items() if name in arguments.makers]
    for strategy in arguments.strategies:
        ways = {
            "ours compiled": (f"ours compiled, {strategy}", partial(own, strategy, False)),
            "ours": (f"ours, {strategy}", partial(own, strategy, None)),
            "ours filled": (f"ours, prompts filled up, {strategy}", partial(own, strategy, None, prompt_windows=True)),
        }
        chosen += [run for name, run in ways.items() if name in arguments.makers]
    for maker, run in chosen:
        yield {**said, "maker": maker, **attempted(run)}
        if arguments.meeting:
            arguments.meeting.end()


def attempted(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A peer that a model does not run with, or has no memory for, leaves the others their turn."""
    try:
        return run()
    except Exception:
        said = traceback.format_exc()[-MOST_SAID:]
    gc.collect()  # once nothing holds the frames of what failed
    torch.cuda.empty_cache()
    return {"error": said}


def diffusers(model: PublishedModel, reference: Tensor, arguments: Arguments, world: int) -> dict[str, Any]:
    """Its blocks compiled; the module is as it was afterwards, but on several GPUs, where hooks stay."""
    model.module.set_attention_backend(CUDNN if torch.cuda.is_available() else "native")
    if world > 1 and model.module._cp_plan is None:
        raise ValueError(f"diffusers has no plan to divide a {type(model.module).__name__}")
    if world > 1 and not torch.accelerator.is_available():
        raise ValueError("diffusers divides a transformer over GPUs alone, not over CPUs: leave it out of --makers")
    if world > 1:
        from diffusers import ContextParallelConfig

        model.module.enable_parallelism(config=ContextParallelConfig(ulysses_degree=world))
    model.module.compile_repeated_blocks(dynamic=False, fullgraph=False)
    try:
        with torch.inference_mode():
            error = relative_error(model.call(), reference)
            return {**timed(model.call, arguments), "relative_error": error}
    finally:
        for part in model.module.modules():
            part._compiled_call_impl = None


def peer_times(model: PublishedModel, reference: Tensor, arguments: Arguments, maker: str) -> dict[str, Any]:
    """Of SGLang's or vLLM-Omni's transformer; the module is where it was afterwards."""
    device = next(model.module.parameters()).device
    try:
        with peer_of(model, maker) as step:
            error = relative_error(step(), reference, MAX_ERROR)
            return {**timed(step, arguments), "relative_error": error}
    finally:
        torch._dynamo.reset()  # which keeps what it compiled
        gc.collect()  # modules with hooks hold themselves
        torch.cuda.empty_cache()
        model.module.to(device)


def ours(
    model: PublishedModel, reference: Tensor, arguments: Arguments, strategy: str, fast: bool | None, **options: Any
) -> dict[str, Any]:
    """Hand-ordered where there is such a step, unless ``fast`` is False: then the module, its blocks compiled."""
    asked: dict[str, Any] = {"strategy": strategy, "precision": arguments.precision, "fast": fast}
    engine = TorchEngine(model.denoiser(), options=TorchOptions(**options), **asked)
    ranks = tuple(range(dist.get_world_size() if dist.is_initialized() else 1))
    engine.warm_up(model.branches, ranks)

    def step() -> tuple[Tensor, ...]:
        return engine.predict(model.branches, ranks)

    allowed = MAX_ERROR if arguments.precision == "native" else MAX_FP8_ERROR
    error = relative_error(torch.cat([answer.flatten() for answer in step()]), reference, allowed)
    times = timed(step, arguments)
    if arguments.profile and not (dist.is_initialized() and dist.get_rank()):
        profiled(model.name, step)
    engine.close()
    return {**times, "relative_error": error}


def timed(step: Callable[[], object], arguments: Arguments) -> dict[str, Any]:
    if arguments.meeting:
        arguments.meeting.begin()
    heat_s = arguments.heat_s if torch.cuda.is_available() else 0.0
    times: Times = measure(step, repeats=arguments.repeats, heat_s=heat_s)
    return {name: round(value, 2) for name, value in asdict(times).items() if value is not None}


def profiled(name: str, step: Callable[[], object]) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(NUM_STEPS):
            step()
        torch.cuda.synchronize()
    show(name, profiler)


if __name__ == "__main__":
    main()
