"""Compare steps of ranks that write into each other's memory with one rank's: one rank a GPU, all GPUs of the host.

torchrun --nproc_per_node N -m tests.engines.torch_engine.support.peer_check [hidden]

"hidden": each rank sees its own GPU only, like the ranks of a gang. Fails if memory cannot be shared, or an answer is
wrong.
"""

from __future__ import annotations

import itertools
import os
import sys
from dataclasses import replace

if "hidden" in sys.argv:  # before any use of a GPU
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]

import torch
import torch.distributed as dist
from torch import Tensor

from engines.core.attention import EarlyKernel, Kernel
from engines.core.layout import TokenLayout
from engines.core.model import Branch
from engines.core.tensors import relative_difference
from engines.parallel.collectives import Axis
from engines.parallel.local_attention import local_kernel
from engines.torch_engine.engine import TorchEngine
from engines.torch_engine.exchange.choose import ExchangeRules
from engines.torch_engine.exchange.heads import masked_attention_of
from engines.torch_engine.exchange.peer_attention import peer_allgather_kv, peer_ulysses
from engines.torch_engine.exchange.peer_memory import reachable
from tests.engines.support import models
from tests.support.flux_denoiser import as_denoiser

PATHS: dict[str, tuple[str, bool | None, ExchangeRules]] = {
    "fast": ("ulysses", None, ExchangeRules()),
    "NCCL": ("ulysses", None, ExchangeRules(peer_memory=False)),
    "in line": ("ulysses", None, ExchangeRules(side_streams=False)),
    "module": ("ulysses", False, ExchangeRules(parts_from_tokens=1)),
    "module, NCCL": ("ulysses", False, ExchangeRules(peer_memory=False, parts_from_tokens=1)),
    "module, keys": ("allgather_kv", False, ExchangeRules(parts_from_tokens=1)),
}
"""The strategy, whether to use the fast path, and how ranks exchange heads or keys."""
NUM_HEADS = (8, 7)
"""The number of ranks divides the first alone."""
NUM_RUNS = 4
"""An uncaptured run, a capture, and two replays: the second finds what the first left in the others' memory."""
BOUND = 1e-4


def branch_of(length: str, device: torch.device) -> Branch:
    (branch,) = models.branches("flux", length)
    return replace(branch, inputs={name: x.to(device) for name, x in branch.inputs.items()})


def own(x_BL: Tensor, axis: Axis) -> Tensor:
    """Return this rank's tokens."""
    return x_BL.chunk(axis.size, 1)[axis.index]


def grouped_difference(axis: Axis, device: torch.device) -> float:
    """Return the worst difference to one rank's attention, with grouped heads and more keys than queries."""
    local = local_kernel(device, torch.float32)
    attend = masked_attention_of(local)
    layout = TokenLayout(lengths=(("text", 16 * axis.size), ("picture", 192 * axis.size)), num_chunks=axis.size)
    keys = peer_allgather_kv(attend, axis, lambda: layout, device)
    kernels: list[Kernel] = [peer_ulysses(attend, axis, device), keys]
    generator, worst = torch.Generator().manual_seed(1), 0.0
    for kernel, _ in itertools.product(kernels, range(NUM_RUNS)):
        shapes = [(192, 12), *[(208, 4)] * 2]
        qkv = [torch.randn(1, axis.size * rows, heads, 16, generator=generator).to(device) for rows, heads in shapes]
        (q, k, v), (expected, _) = (own(x, axis) for x in qkv), local(*qkv)
        answers = [kernel(q, k, v)[0], *([kernel.send(k, v, q)(q)] if isinstance(kernel, EarlyKernel) else [])]
        worst = max(worst, *(relative_difference(x, own(expected, axis)) for x in answers))
        mask_BM = torch.arange(qkv[1].shape[1], device=device)[None] % 3 > 0
        masked, (expected, _) = kernel(q, k, v, mask_BM=own(mask_BM, axis))[0], local(*qkv, mask_BM=mask_BM)
        worst = max(worst, relative_difference(masked, own(expected, axis)))
    return worst


@torch.no_grad()
def main() -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", 0 if "hidden" in sys.argv else rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    several = {num_heads: as_denoiser(models.flux(num_heads).to(device)) for num_heads in NUM_HEADS}
    everyone, wrong = tuple(range(world)), []
    for (num_heads, model), (path, (strategy, fast, rules)) in itertools.product(several.items(), PATHS.items()):
        label = f"{path}, {num_heads} heads"
        engine = TorchEngine(model, strategy=strategy, compiled=False, fast=fast)
        engine.use(rules)
        axis = engine.division.team(everyone).context
        shared = rules.peer_memory and reachable(axis, device, torch.float32)
        branches = (branch_of("even", device), branch_of("uneven", device))
        worst = 0.0
        if world == 4:  # pairs first, with other shapes on either: shared memory need not have been made in one order
            pair, own = (rank // 2 * 2, rank // 2 * 2 + 1), branches[rank // 2]
            answers = [engine.predict((own,), ranks)[0] for ranks in ((rank,), pair, pair, pair)]
            worst = max(relative_difference(answer, answers[0]) for answer in answers[1:])
        for branch in branches:
            (expected,) = engine.predict((branch,), (rank,))
            answers = [engine.predict((branch,), everyone)[0] for _ in range(NUM_RUNS)]
            worst = max(worst, *(relative_difference(answer, expected) for answer in answers))
        wrong += [label] if worst > BOUND or shared != rules.peer_memory else []
        print(f"rank {rank}, {label}: shared memory {shared}, difference {worst:.1e}", flush=True)
        engine.close()
    wrong += ["grouped heads"] if grouped_difference(axis, device) > BOUND else []
    print(f"rank {rank}: {'wrong: ' + ', '.join(wrong) if wrong else 'all agree'}", flush=True)
    torch.cuda.synchronize()
    dist.barrier()
    os._exit(bool(wrong))  # graphs hold the communicator: an orderly shutdown would wait for them


if __name__ == "__main__":
    main()
