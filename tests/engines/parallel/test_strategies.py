"""Strategies as kernels have the output and log-sum-exp of attention on one device, over Gloo."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engines.core.attention import Kernel
from engines.core.layout import TokenLayout
from engines.core.spec import ParallelSpec
from engines.parallel.collectives import Axis
from engines.parallel.local_attention import cpu_flash, plain_attention
from engines.parallel.mesh import Groups, Teams
from engines.parallel.strategies import allgather_kv, ring, whole_queries
from engines.parallel.ulysses import _even_parts, ulysses, ulysses_in_parts
from tests.engines.support.gloo import gang

TOKENS = 5
"""Tokens per rank."""


@pytest.mark.parametrize("name", [
    "ulysses", "ulysses in 1", "ulysses in 2", "ulysses with lse", "ring", "allgather_kv",
])  # fmt: skip
@pytest.mark.parametrize("heads", [(8, 8), (6, 6), (8, 2)], ids=["even", "uneven", "grouped"])
def test_output_and_lse(name: str, heads: tuple[int, int]) -> None:
    out_BLHD, lse_BHL = plain_attention(*qkv(*heads))
    for rank, (mine, lse) in enumerate(gang(4).run(attend, name, heads)):
        rows = slice(rank * TOKENS, (rank + 1) * TOKENS)
        torch.testing.assert_close(mine, out_BLHD[:, rows])
        if name in ("ulysses", "ulysses in 1", "ulysses in 2"):
            assert lse.numel() == 0
        else:
            torch.testing.assert_close(lse, lse_BHL[:, :, rows])


def qkv(heads: int = 8, key_heads: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 4 * TOKENS, n, 16, generator=generator) for n in (heads, key_heads, key_heads)]


def attend(name: str, heads: tuple[int, int]) -> tuple[Tensor, Tensor]:
    rank = dist.get_rank()
    mine = [x[:, rank * TOKENS : (rank + 1) * TOKENS] for x in qkv(*heads)]
    return make_kernel(name, rank)(*mine)


def make_kernel(name: str, rank: int) -> Kernel:
    groups = Groups.of_gang()
    world = Axis(ranks=(0, 1, 2, 3), index=rank, group=groups.name((0, 1, 2, 3)))
    if name == "ring":
        return ring((cpu_flash,) * 4, world)
    if name == "allgather_kv":
        return allgather_kv(cpu_flash, world)
    if " in " in name:
        return ulysses_in_parts(cpu_flash, world, int(name.split()[2]))
    return ulysses(cpu_flash, world, keeps_lse="lse" in name)


@pytest.mark.parametrize("num_tokens", [20, 17, 9], ids=["even", "padded", "a rank without tokens"])
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
def test_queries_that_all_ranks_hold(num_tokens: int, masked: bool) -> None:
    q, k, v, mask = few_queries(num_tokens, masked)
    out_BLHD, lse_BHL = plain_attention(q, k, v, mask_BM=mask)
    answers = gang(4).run(attend_whole, num_tokens, masked)
    for mine, lse, queries in answers:
        assert torch.equal(queries, q), "they stay as they were"
        torch.testing.assert_close(mine, out_BLHD)
        torch.testing.assert_close(lse, lse_BHL)
        assert torch.equal(mine, answers[0][0])


def few_queries(num_tokens: int, masked: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    _, k_BMGD, v_BMGD = (x[:, :num_tokens] for x in qkv(8, 2))
    mask_BM = torch.stack((torch.arange(num_tokens) % 3 > 0, torch.arange(num_tokens) > 6))
    return qkv()[0][:, :3], k_BMGD, v_BMGD, mask_BM if masked else None


def attend_whole(num_tokens: int, masked: bool) -> tuple[Tensor, Tensor, Tensor]:
    layout, rank = TokenLayout(lengths=(("clip", num_tokens),), num_chunks=4), dist.get_rank()
    teams = Teams(rank=rank, num_ranks=4, specs=(spec := ParallelSpec.of("hybrid", 4),), groups=Groups.of_gang())
    q, k, v, mask = few_queries(num_tokens, masked)
    mine, values, masks = (None if x is None else layout.cut(x, dim=1, stream="clip", index=rank) for x in (k, v, mask))
    assert mine is not None
    assert values is not None
    return *whole_queries(cpu_flash, teams.team((0, 1, 2, 3), spec), layout)(q, mine, values, mask_BM=masks), q


@pytest.mark.parametrize(("heads", "wanted", "given"), [(10, 2, 2), (10, 3, 2), (10, 4, 2), (7, 4, 1), (3, 8, 3)])
def test_heads_are_shared_out_evenly(heads: int, wanted: int, given: int) -> None:
    assert _even_parts(heads, wanted) == given


def test_a_ring_of_padding_only_is_our_mistake() -> None:
    nothing = ring((None,), Axis(ranks=(0,), index=0))
    with pytest.raises(AssertionError, match="every rank's keys are padding"):
        nothing(*qkv())
