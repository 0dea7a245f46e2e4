"""AllGather-KV works through each other's memory, with threads for ranks and plain tensors for shared memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor
from torch._inductor.utils import run_and_get_code

from engines.core.attention import EarlyKernel
from engines.core.layout import TokenLayout
from engines.parallel.collectives import Axis
from engines.parallel.local_attention import plain_attention
from engines.torch_engine.exchange.heads import masked_attention_of
from engines.torch_engine.exchange.peer_attention import PeerKeys, peer_allgather_kv
from engines.torch_engine.exchange.peer_memory import copy_rows
from tests.engines.torch_engine.support.teams import WORLD, axis_of
from tests.engines.torch_engine.support.thread_memory import CPU, ThreadMemory, copies_end_at_waits, on_all_ranks

BATCH, DIM = 2, 8
EVEN = TokenLayout(lengths=(("text", 8), ("clip", 20)), num_chunks=WORLD)
UNEVEN = TokenLayout(lengths=(("text", 5), ("clip", 18)), num_chunks=WORLD)
"""The last rank has no text, and less of the clip than the others."""
FEW = TokenLayout(lengths=(("text", 2), ("clip", 5)), num_chunks=WORLD)
"""The last rank has no tokens of either stream."""
LONE, WHOLE = Axis(ranks=(0,), index=0), TokenLayout(lengths=(("clip", 64),), num_chunks=1)


@pytest.fixture(autouse=True)
def shared_memory() -> Iterator[None]:
    with patch("engines.torch_engine.exchange.peer_attention.PeerMemory", ThreadMemory()):
        yield


def kernels(layout: TokenLayout) -> list[EarlyKernel]:
    attend = masked_attention_of(plain_attention)
    return [peer_allgather_kv(attend, axis_of(rank), lambda: layout, CPU) for rank in range(WORLD)]


def qkv(layout: TokenLayout, seed: int, heads: int, key_heads: int) -> tuple[Tensor, ...]:
    """Return the clip's queries and all streams' keys and values."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(layout.length("clip"), heads), *[(layout.num_tokens, key_heads)] * 2]
    return tuple(torch.randn(BATCH, *shape, DIM, generator=generator) for shape in shapes)


def together(
    several: list[EarlyKernel], layout: TokenLayout, seed: int, heads: int, key_heads: int, keys_first: bool = False
) -> Tensor:
    """Return the result of all ranks, each with its tokens and large numbers in place of padding."""
    whole = qkv(layout, seed, heads, key_heads)

    def one(rank: int) -> Tensor:
        names = (("clip",), ("text", "clip"), ("text", "clip"))
        given = [layout.cut_streams(x, dim=1, streams=each, index=rank) for x, each in zip(whole, names, strict=True)]
        q, k, v = (torch.where(x.any(-1, keepdim=True), x, 1e3).mT.contiguous().mT for x in given)  # with gaps
        return several[rank].send(k, v, q)(q) if keys_first else several[rank](q, k, v)[0]

    return layout.join(torch.stack(on_all_ranks(one)), dim=1, stream="clip")


@pytest.mark.parametrize("layout", [EVEN, UNEVEN, FEW], ids=["even", "uneven", "few"])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (3, 1), (5, 5)], ids=str)
def test_equals_attention_on_one_rank(layout: TokenLayout, heads: tuple[int, int]) -> None:
    """Later calls find what earlier ones left in the others' memory."""
    several = kernels(layout)
    for seed in (1, 2, 3, 4):
        expected, _ = plain_attention(*qkv(layout, seed, *heads))
        result = together(several, layout, seed, *heads, keys_first=seed % 2 == 0)
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("layout", [EVEN, UNEVEN, FEW], ids=["even", "uneven", "few"])
def test_masked_keys_count_for_nothing(layout: TokenLayout) -> None:
    """Ranks give their own keys' masks, in which padding rows may be anything."""
    several, (q, *kv) = kernels(layout), qkv(layout, 1, 4, 2)
    mask_BM = torch.arange(BATCH * layout.num_tokens).view(BATCH, -1) % 3 > 0
    streams = ("text", "clip")
    shares = [layout.cut_streams(mask_BM, dim=1, streams=streams, index=rank) for rank in range(WORLD)]

    def one(rank: int) -> Tensor:
        own = (layout.cut_streams(x, dim=1, streams=streams, index=rank) for x in kv)
        return several[rank](layout.cut(q, dim=1, stream="clip", index=rank), *own, mask_BM=shares[rank])[0]

    with patch("engines.torch_engine.exchange.peer_heads.join_masks", lambda *_: torch.cat(shares, dim=1)):
        result = layout.join(torch.stack(on_all_ranks(one)), dim=1, stream="clip")
    torch.testing.assert_close(result, plain_attention(q, *kv, mask_BM=mask_BM)[0])


def test_another_attention_may_come_between() -> None:
    """A compiler may reorder the attentions of clip and sound."""
    early, other = kernels(EVEN), kernels(EVEN)
    parts = [[x.chunk(WORLD, dim=1) for x in qkv(EVEN, seed, 2, 2)] for seed in (1, 2)]

    def one(rank: int) -> tuple[Tensor, Tensor]:
        (q, k, v), others = ([x[rank] for x in several] for several in parts)
        attend = early[rank].send(k, v, q)
        return other[rank](*others)[0], attend(q)

    for got, seed in zip(zip(*on_all_ranks(one), strict=True), (2, 1), strict=True):
        torch.testing.assert_close(torch.cat(got, dim=1), plain_attention(*qkv(EVEN, seed, 2, 2))[0])


def test_keys_are_attended_to_before_others_are_sent() -> None:
    def one(rank: int) -> None:
        kernel, x = kernels(EVEN)[rank], torch.zeros(1, 7, 1, DIM)
        kernel.send(x, x, x)
        with pytest.raises(AssertionError, match="before those sent last"):
            kernel.send(x, x, x)

    on_all_ranks(one)


def test_compilers_make_queries_last_and_keep_keys_until_they_have_arrived() -> None:
    """They sort operations by memory, and reuse memory that has no later reader.

    The cache of compiled graphs is off: an operation's declaration is not part of its key.
    """
    kernel = peer_allgather_kv(masked_attention_of(plain_attention), LONE, lambda: WHOLE, CPU)
    layers_3CC = torch.eye(DIM) + torch.rand(3, DIM, DIM) / 8

    def attention(x_BLC: Tensor) -> Tensor:
        x_BLC = x_BLC.sin()
        k_BLHD, v_BLHD = (torch.unflatten(x_BLC @ layer_CC, 2, (1, DIM)) for layer_CC in layers_3CC[1:])
        attend = kernel.send(k_BLHD, v_BLHD, x_BLC)
        return attend(torch.unflatten(x_BLC @ layers_3CC[0], 2, (1, DIM)))

    x_BLC = torch.randn(1, WHOLE.num_tokens, DIM)
    with (
        inductor.patch(fx_graph_cache=False),
        patch.object(PeerKeys, "send", autospec=True, side_effect=PeerKeys.send) as send,
        patch.object(PeerKeys, "attend", autospec=True, side_effect=PeerKeys.attend) as attend,
    ):
        out, (code,) = run_and_get_code(torch.compile(attention, fullgraph=True), x_BLC)
    torch.testing.assert_close(out, attention(x_BLC))
    calls = re.findall(r"(mm|peer_send|peer_attend)(?:\.default)?\(.*\)\n", code)
    assert calls == ["mm", "mm", "peer_send", "mm", "peer_attend"]
    (_, k, v), (_, q) = send.call_args.args, attend.call_args.args
    assert len({k.data_ptr(), v.data_ptr(), q.data_ptr()}) == 3


def test_shapes_take_turns() -> None:
    several = kernels(EVEN)
    for seed, heads in enumerate(((8, 2), (6, 6), (8, 2))):
        expected, _ = plain_attention(*qkv(EVEN, seed, *heads))
        torch.testing.assert_close(together(several, EVEN, seed, *heads), expected)


@pytest.mark.parametrize("keys_first", [False, True])
def test_what_copies_read_lives_until_they_end(keys_first: bool) -> None:
    """Steps run without a graph too. The keys and values of each rank go to each rank."""
    with copies_end_at_waits() as were_alive:
        together(kernels(EVEN), EVEN, 1, 8, 2, keys_first)
    assert were_alive == [True] * (2 * WORLD * WORLD)


def test_control_with_keys_that_never_leave_fails() -> None:
    num_calls = iter(range(10**6))

    def forgetful(target_RC: Tensor, source_RC: Tensor) -> None:
        if next(num_calls) != 7:
            copy_rows(target_RC, source_RC)

    with patch("engines.torch_engine.exchange.peer_memory.copy_rows", forgetful):
        result = together(kernels(EVEN), EVEN, 1, 8, 2)
    assert not torch.allclose(result, plain_attention(*qkv(EVEN, 1, 8, 2))[0])
