"""Attention calls that every strategy must answer alike, and the functions that ranks run for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from engines.core.attention import Kernel, Prefix
from engines.core.layout import TokenLayout
from engines.core.spec import ParallelSpec
from engines.parallel import strategies as gat
from engines.parallel import strategies as rin
from engines.parallel import ulysses as uly
from engines.parallel.collectives import Axis, Exchange
from engines.parallel.local_attention import cpu_flash, take_rows
from engines.parallel.mesh import Groups, Team, Teams
from engines.parallel.strategies import team_kernel

BATCH, DIM = 2, 16
LENGTHS = (("text", 7), ("image", 22))
NUM_TOKENS = 29


@dataclass(frozen=True, slots=True)
class Case:
    heads: int
    key_heads: int
    masked: bool = False
    causal: bool = False


CASES = {
    "plain": Case(8, 8),
    "grouped": Case(8, 4),
    "fewer key heads than ranks": Case(8, 1),
    "masked": Case(8, 8, masked=True),
    "grouped and masked": Case(8, 2, masked=True),
    "uneven": Case(5, 5),
    "uneven and masked": Case(7, 7, masked=True),
    "uneven, grouped and masked": Case(9, 3, masked=True),
    "causal": Case(8, 8, causal=True),
    "causal and uneven": Case(5, 5, causal=True),
    "causal, uneven, grouped and masked": Case(9, 3, masked=True, causal=True),
}
STRATEGIES = {
    2: ["ulysses", "ulysses in parts", "ring", "allgather_kv"],
    4: ["ulysses", "ulysses in parts", "ring", "allgather_kv", "hybrid", "allgather_kv2xulysses2"],
}


def qkv(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    heads = (case.heads, case.key_heads, case.key_heads)
    q_BLHD, k_BMGD, v_BMGD = (torch.randn(BATCH, NUM_TOKENS, n, DIM, generator=generator) for n in heads)
    return 2 * q_BLHD, k_BMGD, v_BMGD


def mask_of(case: Case) -> Tensor | None:
    """Return a mask: the first picture has a short text; the second attends to four tokens, all with the last rank."""
    if not case.masked:
        return None
    mask_BM = torch.ones(BATCH, NUM_TOKENS, dtype=torch.bool)
    mask_BM[0, 3:7] = False
    mask_BM[1, :-4] = False
    if case.causal:
        mask_BM[1, 0] = True  # all tokens see it
    return mask_BM


def prefix_of(case: Case) -> Prefix | None:
    """Return a prefix: the text sees earlier tokens; then six see each other, two see earlier ones, the rest all."""
    if not case.causal:
        return None
    reach_L = torch.arange(1, NUM_TOKENS + 1)
    reach_L[7:13], reach_L[15:] = 13, NUM_TOKENS
    return Prefix(reach_L, torch.arange(NUM_TOKENS))


EXCHANGES = {
    "ulysses": ("ulysses.all_to_all", lambda x, axis: x),
    "ulysses in parts": ("ulysses.start_all_to_all", lambda x, axis: x.clone()),
    "ring": ("strategies.start_rotation", lambda x, axis: x.clone()),
    "allgather_kv": ("strategies.all_gather", lambda x, axis: torch.stack([x] * axis.size)),
    "hybrid": ("ulysses.all_to_all", lambda x, axis: x),
    "allgather_kv2xulysses2": ("strategies.all_gather", lambda x, axis: torch.stack([x] * axis.size)),
}
MASKS = ("collectives.all_gather", lambda x, axis: torch.stack([x] * axis.size))


def every_answer(num_ranks: int, broken: str) -> dict[tuple[str, str], tuple[Tensor, Tensor]]:
    answers: dict[tuple[str, str], tuple[Tensor, Tensor]] = {}
    for strategy in STRATEGIES[num_ranks]:
        with left_out(broken, strategy):
            kernel = kernel_of(strategy, num_ranks)
            answers |= {(strategy, name): attend(kernel, case, num_ranks) for name, case in CASES.items()}
    return answers


def attend(kernel: Kernel, case: Case, num_ranks: int) -> tuple[Tensor, Tensor]:
    """Return this rank's rows of the result, without padding."""
    rank = dist.get_rank()
    mask_BM, prefix = mask_of(case), prefix_of(case)
    mine_BM = None if mask_BM is None else my_chunk(mask_BM, num_ranks, rank)
    mine = None if prefix is None else Prefix(*(my_chunk(places[None], num_ranks, rank)[0] for places in prefix))
    out_BLHD, lse_BHL = kernel(*(my_chunk(x, num_ranks, rank) for x in qkv(case)), mask_BM=mine_BM, prefix=mine)
    if not lse_BHL.numel():
        return valid_rows(out_BLHD, num_ranks, rank), lse_BHL
    return valid_rows(out_BLHD, num_ranks, rank), valid_rows(lse_BHL.mT, num_ranks, rank).mT


def kernel_of(strategy: str, num_ranks: int) -> Kernel:
    layout = TokenLayout(lengths=LENGTHS, num_chunks=num_ranks)
    name, _, in_parts = strategy.partition(" ")
    return team_kernel(cpu_flash, team_of(name, num_ranks), layout, num_parts=2 if in_parts else 1)


@cache
def team_of(strategy: str, num_ranks: int) -> Team:
    spec, ranks = ParallelSpec.of(strategy, num_ranks), tuple(range(num_ranks))
    return Teams(rank=dist.get_rank(), num_ranks=num_ranks, specs=[spec], groups=Groups.of_gang()).team(ranks, spec)


def sizes_sent(strategy: str, names: tuple[str, ...]) -> dict[str, int]:
    """Return by case how many heads of a token leave a rank in one exchange before attention."""
    sent = {}
    for name in names:
        numbers: list[int] = []
        with recorded(numbers):
            attend(kernel_of(strategy, 4), CASES[name], 4)
        tokens = TokenLayout(lengths=LENGTHS, num_chunks=4).chunk_length
        num_parts = len(numbers) // 2 if "in parts" in strategy else 1
        sent[name] = sum(numbers[:num_parts]) // (BATCH * tokens * DIM)
    return sent


@contextmanager
def recorded(numbers: list[int]) -> Iterator[None]:
    """Record the number of elements of each exchange that begins."""
    with ExitStack() as stack:
        for module, name in (
            (uly, "all_to_all"),
            (uly, "start_all_to_all"),
            (rin, "start_rotation"),
            (gat, "all_gather"),
        ):
            stack.enter_context(patch.object(module, name, noting(getattr(module, name), numbers)))
        yield


def noting(exchange: Exchange, numbers: list[int]) -> Exchange:
    def noted(x: Tensor, axis: Axis) -> Tensor:
        numbers.append(x.numel())
        return exchange(x, axis)

    return noted


def compiled(strategy: str, name: str) -> Tensor:
    kernel = kernel_of(strategy, 2)
    in_one_graph = torch.compile(lambda *qkv, **said: kernel(*qkv, **said), backend="eager", fullgraph=True)
    return attend(in_one_graph, CASES[name], 2)[0]


@contextmanager
def left_out(broken: str, strategy: str) -> Iterator[None]:
    """Disable what ``broken`` names: a strategy's exchange ("exchange"), its masks and places ("masks"), or nothing."""
    if not broken:
        yield
        return
    where, instead = MASKS if broken == "masks" else EXCHANGES[strategy]
    with patch(f"engines.parallel.{where}", instead):
        yield


def my_chunk(x_BL: Tensor, num_ranks: int, rank: int) -> Tensor:
    layout = TokenLayout(lengths=LENGTHS, num_chunks=num_ranks)
    streams = torch.split(x_BL, [length for _, length in LENGTHS], dim=1)
    pieces = [layout.cut(x, dim=1, stream=name, index=rank) for x, (name, _) in zip(streams, LENGTHS, strict=True)]
    return torch.cat(pieces, dim=1)


def valid_rows(x_BL: Tensor, num_ranks: int, rank: int) -> Tensor:
    rows = TokenLayout(lengths=LENGTHS, num_chunks=num_ranks).valid_rows(rank, 1)
    return x_BL if rows is None else take_rows(x_BL, rows)


def my_rows(x_BL: Tensor, num_ranks: int, rank: int) -> Tensor:
    return valid_rows(my_chunk(x_BL, num_ranks, rank), num_ranks, rank)
