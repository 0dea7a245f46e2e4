"""How far every strategy's answer is from float32, at FLUX.1-dev's full size: beside the unsharded module's.

    torchrun --nproc_per_node 4 -m benchmarks.denoise_step.exact [--out FILE]

Random weights, bfloat16 on GPUs, one picture whose tokens divide by the ranks and one whose do not. A strategy passes
if its error is at most 1.2 x that of the unsharded module in bfloat16. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.distributed import start_distributed
from benchmarks.models import flux
from benchmarks.models.flux_denoiser import as_denoiser
from benchmarks.results import status_of
from benchmarks.timing import rank_synchronize
from engines.core.model import Branch
from engines.core.spec import tiling_sizes
from engines.core.tensors import relative_difference
from engines.torch_engine.engine import TorchEngine
from engines.torch_engine.exchange import choose
from engines.torch_engine.options import TorchOptions

SIDES = {"even": 512, "uneven": 496}
ALLOWED = 1.2
STRATEGIES = ("ulysses", "allgather_kv", "ring", "hybrid", "guidance", "tensor")
Inputs = dict[str, Tensor]


@torch.no_grad()
def float32_answers(module: Any, inputs: dict[str, Inputs]) -> dict[str, Tensor]:
    """``module`` in float32, unsharded."""
    exact = copy.deepcopy(module).float()
    exact.set_attention_backend("native")
    answers = {name: exact(**widened(some), return_dict=False)[0] for name, some in inputs.items()}
    del exact
    torch.cuda.empty_cache()  # NCCL needs some of what GPUs of 80 GB have left
    return answers


def widened(inputs: Inputs) -> Inputs:
    return {name: tensor.float() for name, tensor in inputs.items()}


def errors_of(options: dict[str, Any], module: Any, inputs: dict[str, Inputs], exact: dict[str, Tensor]) -> Any:
    """Relative error by (length, num_ranks), on this rank, of a step with one branch and (guidance) with two."""
    engine = TorchEngine(as_denoiser(module), **options)
    rank = torch.distributed.get_rank()
    num_runs = 3 if engine.config.capture else 1  # as it comes, captured, replayed
    found = {}
    for num_ranks in tiling_sizes(torch.distributed.get_world_size()):
        first = rank // num_ranks * num_ranks
        for length, some in inputs.items():
            branches = (Branch(inputs=some),) * (2 if "guidance" in options["strategy"] else 1)
            answers = [
                answer.float()
                for _ in range(num_runs)
                for answer in engine.predict(branches, tuple(range(first, first + num_ranks)))
            ]
            found[length, num_ranks] = max(relative_difference(answer, exact[length]) for answer in answers)
    engine.close()
    return found


THROUGH_NCCL = TorchOptions(peer_memory=False)


def makers(on_gpu: bool) -> dict[str, dict[str, Any]]:
    """Every strategy by NCCL (or Gloo) as it comes; on GPUs then as captured steps, and through peer memory."""
    plain: dict[str, Any] = {"compiled": False, "capture": False, "options": THROUGH_NCCL}
    found = {strategy: {"strategy": strategy, **plain} for strategy in STRATEGIES}
    found["ulysses, module"] = {"strategy": "ulysses", "fast": False, **plain}
    if on_gpu:
        found["ulysses, module, peer memory"] = {"compiled": False, "fast": False}
        found["ulysses, captured"] = {"compiled": False, "options": THROUGH_NCCL}
        found["ulysses, peer memory"] = {"compiled": False}
    return {label: {"strategy": "ulysses", **options} for label, options in found.items()}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    rank, _ = start_distributed()
    on_gpu = torch.cuda.is_available()
    device, dtype = (torch.device("cuda", rank), torch.bfloat16) if on_gpu else (torch.device("cpu"), torch.float32)
    module = flux.build(device, dtype, small=not on_gpu)
    text = flux.TEXT_TOKENS if on_gpu else 64
    inputs = {length: flux.inputs(module, side, text=text) for length, side in SIDES.items()}
    exact = float32_answers(module, inputs)
    module.set_attention_backend("_native_cudnn" if on_gpu else "native")
    base = {
        name: relative_difference(module(**some, return_dict=False)[0].float(), exact[name])
        for name, some in inputs.items()
    }
    document: dict[str, Any] = {"module_error": base, "worst_ratio": 0.0, "results": []}
    for label, options in makers(on_gpu).items():
        by_memory = options.get("options") is not THROUGH_NCCL
        try:
            with patch.object(choose, "PARTS_FROM_TOKENS", 1) if by_memory else nullcontext():  # as long steps
                found = errors_of(options, module, inputs, exact)
        except Exception:
            document["results"].append({"strategy": label, "error": traceback.format_exc()[-300:]})
            print(f"rank {rank}, {label}: failed\n{traceback.format_exc()[-1500:]}", flush=True)
            continue
        results = [result_of(label, key, error, base) for key, error in found.items()]
        document["results"] += results
        document["worst_ratio"] = max(document["worst_ratio"], *(result["ratio"] for result in results))
        if rank == 0:
            print(*map(line_of, results), sep="\n", flush=True)
        if rank == 0 and out:  # after each: a later one may hang
            out.write_text(json.dumps(document))
    if rank == 0:
        print(json.dumps(document), flush=True)
    rank_synchronize()
    os._exit(status_of(document["results"]))  # groups of several engines: an orderly shutdown would take its time


def result_of(label: str, case: tuple[str, int], error: float, base: dict[str, float]) -> dict[str, Any]:
    """One line of the table; in float32 the module itself is exact, and nothing is compared with it."""
    length, num_ranks = case
    ratio = round(error / base[length], 4) if base[length] > 1e-6 else 1.0
    said = {"strategy": label, "num_ranks": num_ranks, "length": length}
    return said | {"relative_error": float(f"{error:.3e}"), "ratio": ratio}


def line_of(result: dict[str, Any]) -> str:
    verdict = "ok" if result["ratio"] <= ALLOWED else "TOO FAR"
    return (
        f"{result['strategy']:32} w{result['num_ranks']} {result['length']:7} error {result['relative_error']:.3e} "
        f"= {result['ratio']:.3f} x module: {verdict}"
    )


if __name__ == "__main__":
    main()
