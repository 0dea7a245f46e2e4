"""How far every strategy's answer is from float32, at FLUX.1-dev's full size: beside the unsharded module's.

    torchrun --nproc_per_node 4 -m benchmarks.denoise_step_exact [--out FILE]

Random weights, bfloat16 on GPUs, one picture whose tokens divide by the ranks and one whose do not. A strategy passes
if its error is at most 1.2 x that of the unsharded module in bfloat16. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import flux_case
from benchmarks.denoise_step import start_distributed
from benchmarks.timing import rank_synchronize
from engines.model import Branch
from engines.parallel.mesh import gang_widths
from engines.parallel.self_check import relative_difference
from engines.torch_engine.config import TorchEngineConfig
from engines.torch_engine.engine import TorchEngine
from engines.torch_engine.fast_step import Overlap
from pipelines.flux.denoiser import as_denoiser

SIDES = {"even": 512, "uneven": 496}
ALLOWED = 1.2
STRATEGIES = ("ulysses", "allgather_kv", "ring", "hybrid", "guidance", "tensor")
Inputs = dict[str, Tensor]


@torch.no_grad()
def float32_answers(module: Any, inputs: dict[str, Inputs]) -> dict[str, Tensor]:
    """``module`` in float32, unsharded."""
    exact = copy.deepcopy(module).float()
    exact.set_attention_backend("native")
    return {name: exact(**widened(some), return_dict=False)[0] for name, some in inputs.items()}


def widened(inputs: Inputs) -> Inputs:
    return {name: tensor.float() for name, tensor in inputs.items()}


def errors_of(config: TorchEngineConfig, module: Any, inputs: dict[str, Inputs], exact: dict[str, Tensor]) -> Any:
    """Relative error by (length, width), on this rank, of a step with one branch and (guidance) with two."""
    engine = TorchEngine(as_denoiser(module), config=config)
    rank = torch.distributed.get_rank()
    found = {}
    for width in gang_widths(torch.distributed.get_world_size()):
        first = rank // width * width
        for length, some in inputs.items():
            branches = (Branch(inputs=some),) * (2 if "guidance" in config.strategy else 1)
            answers = engine.predict(branches, tuple(range(first, first + width)))
            found[length, width] = max(relative_difference(answer.float(), exact[length]) for answer in answers)
    engine.close()
    return found


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    rank, _ = start_distributed()
    on_gpu = torch.cuda.is_available()
    device, dtype = (torch.device("cuda", rank), torch.bfloat16) if on_gpu else (torch.device("cpu"), torch.float32)
    module = flux_case.build(device, dtype, small=not on_gpu)
    text = flux_case.TEXT_TOKENS if on_gpu else 64
    inputs = {length: flux_case.inputs(module, side, text=text) for length, side in SIDES.items()}
    exact = float32_answers(module, inputs)
    module.set_attention_backend("_native_cudnn" if on_gpu else "native")
    base = {
        name: relative_difference(module(**some, return_dict=False)[0].float(), exact[name])
        for name, some in inputs.items()
    }
    results: list[dict[str, Any]] = []
    makers = [(strategy, "auto", Overlap()) for strategy in STRATEGIES] + [("ulysses", "module", Overlap())]
    makers += [("ulysses", "auto", Overlap(peer_memory=True))] if on_gpu else []
    for strategy, path, overlap in makers:
        config: Any = {"strategy": strategy, "path": path, "overlap": overlap, "compile": "eager", "capture": False}
        for (length, width), error in errors_of(TorchEngineConfig(**config), module, inputs, exact).items():
            label = strategy + (", module" if path == "module" else ", peer memory" if overlap.peer_memory else "")
            ratio = error / base[length] if base[length] > 1e-6 else 1.0
            results.append(
                {"strategy": label, "width": width, "length": length, "error": float(f"{error:.3e}"), "ratio": ratio}
            )
            if rank == 0:
                verdict = "ok" if ratio <= ALLOWED else "TOO FAR"
                print(f"{label:24} w{width} {length:7} error {error:.3e} = {ratio:.3f} x module: {verdict}", flush=True)
    document = {"module_error": base, "worst_ratio": max(result["ratio"] for result in results), "results": results}
    if rank == 0:
        if out:
            out.write_text(json.dumps(document))
        print(json.dumps(document), flush=True)
    rank_synchronize()
    os._exit(0)  # groups of several engines: an orderly shutdown would take its time


if __name__ == "__main__":
    main()
