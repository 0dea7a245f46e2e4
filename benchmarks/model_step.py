"""Milliseconds per forward of published transformers (random weights), beside diffusers on the same weights.

    python -m benchmarks.model_step [MODEL ...]                              one GPU (or a small checkpoint on the CPU)
    torchrun --nproc_per_node 2 -m benchmarks.model_step [MODEL ...]         two GPUs

``--branches 2`` times both forwards of a guided step, as a job makes them. On two GPUs each can have one:

    python -m benchmarks.model_step Qwen-Image --branches 2
    torchrun --nproc_per_node 2 -m benchmarks.model_step Qwen-Image --branches 2 --strategies guidance

SGLang's and vLLM-Omni's transformers of FLUX, Z-Image, Qwen-Image, Wan, Cosmos 3, LTX-2, MiniMax-H3 and HunyuanVideo
1.5 (vLLM-Omni's alone) are timed where they are installed, and xDiT's attention in FLUX.1. On several GPUs they are
divided as these projects do it (benchmarks/peers/published.py). ``sglang-graphs`` is SGLang with its own CUDA graphs. A
name that ends with ``-captured`` is a step captured whole in one CUDA graph:

    python -m benchmarks.model_step Qwen-Image --branches 2 --makers sglang vllm-omni sglang-blocks diffusers ours
    torchrun --nproc_per_node 2 -m benchmarks.model_step Qwen-Image --branches 2 --makers ours sglang sglang-captured

Pictures have 1024 x 1024 pixels, clips their models' usual sizes; on a CPU both are small. diffusers is timed eagerly
and with its blocks compiled, with cuDNN's attention. On several GPUs it uses its Ulysses, where it has a plan; a
process can then time nothing else. "diffusers-undivided" is what one GPU takes, for transformers that it does not
divide. "ours" is the engine as a gang calls it, after what is made once a job is made;
"ours, fp8 attention" the same with attention in float8, on a Hopper GPU with fa3-fwd (or emulated on a CPU);
"ours in parts" the same with heads exchanged in parts at any length, or keys through peer memory, as a gang with "auto"
tries it as well.
``--precision`` is that of ours, SGLang and vLLM-Omni.

``--blocks 4`` keeps the first 4 blocks of each list of the transformer, where whole steps take too long. Errors and
"floor_ms" are then those of the kept blocks. "whole_ms" is an estimate: the median, scaled up to all blocks. Time
outside of blocks is scaled too. It is left out if the lists keep unequal shares. Other projects keep all blocks:

    python -m benchmarks.model_step Wan2.1-T2V-14B --blocks 4 --repeats 5 --heat-s 1 --makers "ours, fp8 attention"

Makers are timed in the order of ``--makers``, those of diffusers' module first. ``--exact`` compares with the module in
float32. A strategy is right if its error is at most 1.2 x that of "eager". The last line is one JSON document. The
status is 1 if nothing was measured of one of the models. ``benchmarks.peers.run`` runs many of these on a host.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.kernel_times import print_profile
from benchmarks.models.published import PublishedModel
from benchmarks.peers import capture
from benchmarks.peers.published import MAKERS as PEERS
from benchmarks.peers.published import OpenPeer, of_project
from benchmarks.results import status_of
from benchmarks.timing import BF16_TFLOPS, measure, rank_synchronize, relative_error, start_distributed
from engines.core.spec import ParallelSpec
from engines.torch_engine.engine import TorchEngine
from engines.torch_engine.exchange.choose import ExchangeRules
from engines.torch_engine.options import TorchOptions
from pipelines.size import Size

MODELS = ("Z-Image-Turbo", "Qwen-Image", "FLUX.2-klein-4B", "FLUX.2-dev")
CLIPS = ("Wan2.1-T2V-14B", "Wan2.2-I2V-A14B", "HunyuanVideo-1.5-480p_t2v", "LTX-2", "MiniMax-H3", "Cosmos3-Nano")
UNDIVIDED, RING, REDUCE_OVERHEAD = "diffusers-undivided", "diffusers-ring", "diffusers-reduce-overhead"
OF_MODULE = ("eager", "diffusers", RING, UNDIVIDED, REDUCE_OVERHEAD)
CAPTURABLE = (*OF_MODULE[:-1], *(peer for peer in PEERS if peer != "sglang-graphs"))
FP8_ATTENTION, IN_PARTS = "ours, fp8 attention", "ours in parts"
OURS = ("ours compiled", "ours", "ours filled", FP8_ATTENTION, IN_PARTS)
MAKERS = (*OF_MODULE, *PEERS, *(maker + capture.SUFFIX for maker in CAPTURABLE), *OURS)
MAX_ERROR, MAX_FP8_ERROR = 0.05, 0.2
"""In bf16, sums in another order differ."""
CUDNN = "_native_cudnn"
MAX_ERROR_CHARACTERS, NUM_ADDITIONS = 3000, 2_000_000
Result = dict[str, Any]
Way = tuple[str, Callable[[], Result]]


class Arguments(argparse.Namespace):
    models: Sequence[str] = MODELS
    size: Sequence[Size | None]
    tokens: int | None = None
    branches: int = 1
    batch: int = 1
    blocks: int | None = None
    repeats: int = 20
    heat_s: float = 5.0
    makers: Sequence[str] = ("eager", "diffusers", "ours")
    strategies: Sequence[str] = ("ulysses",)
    precision: str = "native"
    profile: bool = False
    exact: bool = False
    out: Path | None = None


@torch.no_grad()
def main() -> None:
    arguments = parse(sys.argv[1:])
    rank, world = start_distributed()
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    document: Result = {"hardware": f"{world} x {hardware}", "torch": torch.__version__, "python_s": python_s()}
    document["results"] = []
    say(f"{document['hardware']}, torch {torch.__version__}, ten million additions in Python {document['python_s']} s")
    for name in arguments.models:
        for size in arguments.size:
            failure = attempt(partial(time_model, document, name, size, device, world, arguments))
            if "error" in failure:
                say(f"{name}: failed\n{failure['error']}")
            torch._dynamo.reset()
            torch.cuda.empty_cache()
            rank_synchronize()
    say(json.dumps(document))
    groups = ([one for one in document["results"] if one["model"] == name] for name in arguments.models)
    os._exit(max(map(status_of, groups)))  # graphs hold the communicator: an orderly shutdown would wait for them


def python_s() -> float:
    """Return the seconds of ten million additions: steps that are not captured wait for Python."""
    start_s, total = time.perf_counter(), 0
    for number in range(NUM_ADDITIONS):
        total += number
    return round((time.perf_counter() - start_s) * 10_000_000 / NUM_ADDITIONS, 2)


def say(text: str) -> None:
    """Print ``text`` on the first rank."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, flush=True)


def attempt(run: Callable[[], Result]) -> Result:
    """Return the result of ``run``, or its "error". A maker that fails does not affect the others."""
    try:
        return run()
    except Exception:
        error = traceback.format_exc()[-MAX_ERROR_CHARACTERS:]
    gc.collect()  # once nothing holds the frames of what failed
    torch.cuda.empty_cache()
    return {"error": error}


def time_model(
    document: Result, name: str, size: Size | None, device: torch.device, world: int, arguments: Arguments
) -> Result:
    """Time all makers. The first rank prints results, and writes the document after each: a later one may hang."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    sizes = (size, arguments.tokens, arguments.branches, arguments.batch, arguments.blocks)
    model = PublishedModel.made(name, device, dtype, *sizes)
    facts = facts_of(model, world)
    say(", ".join(f"{key} {value}" for key, value in facts.items()))
    for result in results_of(model, facts, arguments, world):
        say(json.dumps(result))
        document["results"].append(result)
        if arguments.out and (not dist.is_initialized() or dist.get_rank() == 0):
            arguments.out.write_text(json.dumps(document))
    return {}


def facts_of(model: PublishedModel, world: int) -> Result:
    """Return the facts known before any timing. The floor is all arithmetic at an H200's rate, on all ranks."""
    flop = model.flop()
    facts = {"model": model.name, "size": str(model.size), "tokens": model.num_tokens, "branches": len(model.branches)}
    facts["batch"] = model.branch.batch
    if model.num_blocks is not None:
        facts["blocks"] = ", ".join(f"{kept} of {every}" for kept, every in model.blocks())
    tera_flop, floor_ms = round(flop / 1e12, 1), round(flop / BF16_TFLOPS / 1e9 / world, 1)
    return facts | {"ranks": world, "tera_flop": tera_flop, "floor_ms": floor_ms}


def results_of(model: PublishedModel, facts: Result, arguments: Arguments, world: int) -> Iterator[Result]:
    """Yield ``facts`` with the times of each maker."""
    reference = model.exact_call() if arguments.exact else model.call()
    with OpenPeer(model, arguments.precision) as peer:
        ways = ways_of(model, reference, arguments, world, peer)
        for name in in_order(arguments.makers):
            if name in OURS:
                peer.close()  # GPUs of 80 GB have no room for both
            has_precision = name in OURS or of_project(name)
            precision = {"precision": arguments.precision if has_precision else "native"}
            for maker, run in ways[name]:
                yield {**facts, **precision, "maker": maker, **of_whole(model, attempt(run))}


def of_whole(model: PublishedModel, result: Result) -> Result:
    """Return ``result`` with an estimate for all blocks, if some are left out in the same share of each list."""
    shares = {every / kept for kept, every in model.blocks()} if model.num_blocks else set()
    if len(shares) != 1 or "median_ms" not in result:
        return result
    return {**result, "whole_ms": round(result["median_ms"] * shares.pop(), 2)}


def in_order(makers: Iterable[str]) -> list[str]:
    """Return the makers of diffusers' module first, before its attention is Troupe's, and the others as they come."""
    return sorted(makers, key=lambda maker: maker.removesuffix(capture.SUFFIX) not in OF_MODULE)


def ways_of(
    model: PublishedModel, reference: Tensor, arguments: Arguments, world: int, peer: OpenPeer
) -> dict[str, list[Way]]:
    """Return by maker the name of its results, and the function that makes them."""
    ways: dict[str, tuple[str, Callable[..., Result]]] = {
        "eager": ("diffusers eager", partial(eager, model, reference, arguments)),
        "diffusers": ("diffusers compiled", partial(diffusers, model, reference, arguments, world)),
        RING: (RING, partial(diffusers, model, reference, arguments, world, degree="ring_degree")),
        UNDIVIDED: ("diffusers compiled, undivided", partial(diffusers, model, reference, arguments, 1)),
        REDUCE_OVERHEAD: (REDUCE_OVERHEAD, partial(eager, model, reference, arguments, reduce=True)),
        **{name: (name, partial(peer_times, peer, name, reference, arguments)) for name in PEERS},
    }
    captured: dict[str, list[Way]] = {
        name + capture.SUFFIX: [(said + capture.SUFFIX, partial(run, captured=True))]
        for name, (said, run) in ways.items()
        if name in CAPTURABLE
    }
    own = partial(ours, model, reference, arguments)
    return {
        **{name: [way] for name, way in ways.items()},
        **captured,
        "ours compiled": [(f"ours compiled, {each}", partial(own, each, False)) for each in arguments.strategies],
        "ours": [(f"ours, {each}", partial(own, each, None)) for each in arguments.strategies],
        "ours filled": [
            (f"ours, prompts filled up, {each}", partial(own, each, None, prompt_windows=True))
            for each in arguments.strategies
        ],
        FP8_ATTENTION: [
            (f"{FP8_ATTENTION}, {each}", partial(own, each, None, attention="fp8")) for each in arguments.strategies
        ],
        IN_PARTS: [
            (f"ours, in parts, {each}", partial(own, each, None, exchange=ExchangeRules(parts_from_tokens=1)))
            for each in arguments.strategies
            if exchanges_in_parts(each, world)
        ],
    }


def exchanges_in_parts(strategy: str, world: int) -> bool:
    """Return whether a strategy exchanges in parts, or may. The engine refuses one that these ranks cannot use."""
    try:
        spec = ParallelSpec.of(strategy, world)
        return world == 1 or spec.ulysses > 1 or spec.allgather_kv > 1
    except ValueError:
        return True


def eager(
    model: PublishedModel, reference: Tensor, arguments: Arguments, captured: bool = False, reduce: bool = False
) -> Result:
    if captured or reduce:
        set_attention(model)
    with torch.inference_mode(captured or reduce):
        return times_of(reduced(model.call) if reduce else model.call, reference, arguments, captured)


def reduced(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Compile ``step`` with ``mode="reduce-overhead"``. Its answer is valid until the next step."""
    compiled = torch.compile(step, mode="reduce-overhead", fullgraph=True, dynamic=False)

    def run() -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        answer: Tensor = compiled()
        return answer

    return run


def set_attention(model: PublishedModel) -> None:
    model.module.set_attention_backend(CUDNN if torch.cuda.is_available() else "native")


def diffusers(
    model: PublishedModel,
    reference: Tensor,
    arguments: Arguments,
    world: int,
    captured: bool = False,
    degree: str = "ulysses_degree",
) -> Result:
    """Time it with compiled blocks. Afterwards the module is unchanged, except on several GPUs, where hooks stay."""
    set_attention(model)
    if world > 1 and model.module._cp_plan is None:
        raise ValueError(f"diffusers has no plan to divide a {type(model.module).__name__}")
    if world > 1 and not torch.accelerator.is_available():
        raise ValueError("diffusers divides a transformer over GPUs alone, not over CPUs: leave it out of --makers")
    if world > 1 and model.module._parallel_config is None:
        from diffusers import ContextParallelConfig

        model.module.enable_parallelism(config=ContextParallelConfig(**{degree: world}))
    model.module.compile_repeated_blocks(dynamic=False, fullgraph=False)
    try:
        with torch.inference_mode():
            return times_of(model.call, reference, arguments, captured)
    finally:
        for part in model.module.modules():
            part._compiled_call_impl = None


def peer_times(peer: OpenPeer, maker: str, reference: Tensor, arguments: Arguments, captured: bool = False) -> Result:
    """Time another project's transformer."""
    return times_of(peer.step(maker), reference, arguments, captured, MAX_ERROR)


def times_of(
    step: Callable[[], Tensor], reference: Tensor, arguments: Arguments, captured: bool, allowed: float | None = None
) -> Result:
    """Time ``step``, or its graph."""
    if not captured:
        error = relative_error(step(), reference, allowed)
        return {**timed(step, arguments), "relative_error": error}
    graph = capture.captured(step)
    error = relative_error(graph(), reference, allowed)
    times = timed(graph, arguments)
    graph.close()
    return {**times, "relative_error": error, "capture_error": graph.error}


def ours(
    model: PublishedModel,
    reference: Tensor,
    arguments: Arguments,
    strategy: str,
    fast: bool | None,
    attention: str = "auto",
    exchange: ExchangeRules | None = None,
    **options: Any,
) -> Result:
    """Time the engine: hand-ordered where there is such a step; with ``fast=False`` the module, its blocks compiled."""
    asked: dict[str, Any] = {"strategy": strategy, "precision": arguments.precision, "fast": fast}
    asked["attention"] = attention
    engine = TorchEngine(model.denoiser(), options=TorchOptions(**options), **asked)
    if exchange is not None:
        engine.use(exchange)
    ranks = tuple(range(dist.get_world_size() if dist.is_initialized() else 1))
    engine.warm_up(model.branches, ranks)

    def step() -> tuple[Tensor, ...]:
        return engine.predict(model.branches, ranks)

    is_exact = arguments.precision == "native" and attention == "auto"
    allowed = MAX_ERROR if is_exact else MAX_FP8_ERROR
    error = relative_error(torch.cat([answer.flatten() for answer in step()]), reference, allowed)
    times = timed(step, arguments)
    if arguments.profile:
        print_profile(model.name, step, dist.get_rank() if dist.is_initialized() else 0)
    engine.close()
    return {**times, "relative_error": error}


def timed(step: Callable[[], object], arguments: Arguments) -> Result:
    heat_s = arguments.heat_s if torch.cuda.is_available() else 0.0
    times = measure(step, repeats=arguments.repeats, heat_s=heat_s)
    return {name: round(value, 2) for name, value in asdict(times).items() if value is not None}


def parse(words: Sequence[str]) -> Arguments:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=Arguments.models, help=f"clips: {', '.join(CLIPS)}")
    sizes = "WIDTHxHEIGHT, of clips WIDTHxHEIGHTxFRAMES; may be given several times"
    parser.add_argument("--size", type=Size.parse, action="append", help=sizes)
    parser.add_argument("--tokens", type=int, help="of the prompt")
    parser.add_argument("--branches", type=int, default=1, help="forwards of one step: 2 with guidance")
    parser.add_argument("--batch", type=int, default=1, help="pictures in one forward, where a model takes several")
    parser.add_argument("--blocks", type=int, help="kept of each list of the transformer; default: all")
    parser.add_argument("--repeats", type=int, default=Arguments.repeats)
    parser.add_argument("--heat-s", type=float, default=Arguments.heat_s, help="for which GPUs work before them")
    known = ", ".join(MAKERS)
    parser.add_argument("--makers", nargs="+", default=Arguments.makers, choices=MAKERS, help=known)
    parser.add_argument("--strategies", nargs="+", default=Arguments.strategies, help="of ours, one after the other")
    parser.add_argument("--precision", default=Arguments.precision, help="of ours and of peers that have it")
    parser.add_argument("--exact", action="store_true", help="compare with the module in float32")
    parser.add_argument("--profile", action="store_true", help="also print the kernels of ours")
    parser.add_argument("--out", type=Path, help="file for the JSON document")
    arguments = parser.parse_args(words, namespace=Arguments())
    arguments.size = arguments.size or (None,)
    others = [maker for maker in arguments.makers if maker.removesuffix(capture.SUFFIX) in PEERS]
    if arguments.blocks is not None and arguments.blocks < 1:
        parser.error(f"--blocks {arguments.blocks}: keep at least 1 block")
    if arguments.blocks is not None and others:
        parser.error(f"--blocks: {', '.join(others)} always have all blocks; leave out --blocks or these makers")
    return arguments


if __name__ == "__main__":
    main()
