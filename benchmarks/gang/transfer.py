"""What a change of a job's team costs: its state goes from one rank to the others.

    torchrun --nproc_per_node 4 -m benchmarks.gang.transfer [--side 1024] [--repeats 50]

The state is that of FLUX.1-dev in bfloat16: latents and a prompt of 512 tokens. The floor is the broadcast of as many
bytes. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.distributed import start_distributed
from benchmarks.timing import Times, measure, rank_synchronize
from engines.gang.jobs.rank_jobs import transfer

CHANNELS, TEXT_TOKENS, TEXT_CHANNELS = 64, 512, 4096


def state_of(side: int, device: torch.device) -> dict[str, Any]:
    latents = torch.zeros(1, (side // 16) ** 2, CHANNELS, dtype=torch.bfloat16, device=device)
    text = torch.zeros(1, TEXT_TOKENS, TEXT_CHANNELS, dtype=torch.bfloat16, device=device)
    return {"latents": latents, "text": text, "step": 5}


def transfer_times(side: int, repeats: int) -> tuple[int, Times, Times]:
    """Bytes of the state's tensors, and times of their bare broadcast and of handing the state over. All ranks call."""
    rank = dist.get_rank()
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    state = state_of(side, device)
    message = torch.cat([x.flatten() for x in state.values() if isinstance(x, torch.Tensor)])
    bare = measure(lambda: dist.broadcast(message, src=0), repeats=repeats)
    whole = measure(lambda: transfer(state if rank == 0 else None, source=0, rank=rank, device=device), repeats=repeats)
    return message.nbytes, bare, whole


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=50)
    arguments = parser.parse_args()
    rank, world = start_distributed()
    if world < 2:
        parser.error("a state goes from one rank to others: start two or more with torchrun --nproc_per_node")
    num_bytes, bare, whole = transfer_times(arguments.side, arguments.repeats)
    if rank == 0:
        print(f"floor: broadcast of {num_bytes / 2**20:.1f} MiB to {world} ranks: median {bare.median_ms:.2f} ms")
        print(f"hand over: median {whole.median_ms:.2f}, lowest {whole.lowest_ms:.2f}, p90 {whole.p90_ms:.2f} ms")
        times = {"floor": asdict(bare), "transfer": asdict(whole)}
        print(json.dumps({"num_ranks": world, "side": arguments.side, "num_bytes": num_bytes} | times), flush=True)
    rank_synchronize()
    os._exit(0)


if __name__ == "__main__":
    main()
