"""Ulysses works through each other's memory, with threads for ranks and plain tensors for shared memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from engines.core.attention import Kernel
from engines.core.layout import Rows
from engines.fast import graph
from engines.fast.graph import GraphPool
from engines.parallel.collectives import Axis
from engines.parallel.local_attention import plain_attention
from engines.torch_engine.exchange.heads import masked_attention_of
from engines.torch_engine.exchange.peer_attention import PeerUlysses, parts_of, peer_ulysses
from engines.torch_engine.exchange.peer_memory import copy_rows
from tests.engines.torch_engine.support.teams import WORLD, axis_of
from tests.engines.torch_engine.support.thread_memory import CPU, ThreadMemory, copies_end_at_waits, on_all_ranks

BATCH, LENGTH, DIM = 2, 5, 8


@pytest.fixture(autouse=True)
def shared_memory() -> Iterator[None]:
    with patch("engines.torch_engine.exchange.peer_attention.PeerMemory", ThreadMemory()):
        yield


def qkv(seed: int, heads_each: int = 6, keys_each: int = 0, num_keys: int = LENGTH) -> tuple[Tensor, ...]:
    """Return q, k and v. A rank has ``keys_each`` key heads (0: as many as query heads) and ``num_keys`` keys."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(LENGTH, heads_each), *[(num_keys, keys_each or heads_each)] * 2]
    return tuple(torch.randn(BATCH, WORLD * rows, WORLD * heads, DIM, generator=generator) for rows, heads in shapes)


def kernels(key_rows: Rows | None = None) -> list[Kernel]:
    attend = masked_attention_of(plain_attention, key_rows)
    return [peer_ulysses(attend, axis_of(rank), CPU) for rank in range(WORLD)]


def together(several: list[Kernel], seed: int, *sizes: int) -> Tensor:
    """Return the result of all ranks, each with its tokens."""
    cut = [x_BLHD.chunk(WORLD, dim=1) for x_BLHD in qkv(seed, *sizes)]
    return torch.cat(on_all_ranks(lambda rank: several[rank](*(chunks[rank] for chunks in cut))[0]), dim=1)


@pytest.mark.parametrize(("key_rows", "padding"), [(None, ()), (((0, 5), (6, 11)), (5, 11))], ids=["even", "uneven"])
def test_masked_keys_count_for_nothing(key_rows: Rows | None, padding: tuple[int, ...]) -> None:
    """Rows of padding count for nothing either, whatever the mask holds there."""
    several, whole = kernels(key_rows), qkv(1, 4, 2, 3)
    mask_BM = torch.arange(BATCH * WORLD * 3).view(BATCH, -1) % 3 > 0
    cut, masks = [x_BLHD.chunk(WORLD, dim=1) for x_BLHD in whole], mask_BM.chunk(WORLD, dim=1)

    def one(rank: int) -> Tensor:
        return several[rank](*(chunks[rank] for chunks in cut), mask_BM=masks[rank])[0]

    with patch("engines.torch_engine.exchange.peer_heads.join_masks", lambda *_: mask_BM):
        result = torch.cat(on_all_ranks(one), dim=1)
    attended_BM = (
        mask_BM if key_rows is None else mask_BM & torch.tensor([number not in (5, 11) for number in range(12)])
    )
    torch.testing.assert_close(result, plain_attention(*whole, mask_BM=attended_BM)[0])


@pytest.mark.parametrize("sizes", [(1,), (2,), (3,), (6,), (8, 2), (8, 1), (4, 4, 7), (8, 4, 3)], ids=str)
def test_equals_attention_on_one_rank(sizes: tuple[int, ...]) -> None:
    """It holds for all heads, grouped heads, and more or fewer keys than queries. Later calls find what earlier ones
    left in the others' memory."""
    several = kernels()
    for seed in (1, 2, 3):
        expected, _ = plain_attention(*qkv(seed, *sizes))
        torch.testing.assert_close(together(several, seed, *sizes), expected)


def test_shapes_take_turns() -> None:
    several = kernels()
    for seed, sizes in enumerate(((8, 2), (6,), (8, 2, 7), (8, 2))):
        expected, _ = plain_attention(*qkv(seed, *sizes))
        torch.testing.assert_close(together(several, seed, *sizes), expected)


def test_what_copies_read_lives_until_they_end() -> None:
    """Steps run without a graph too. Queries, keys, values and results go in three parts between all ranks."""
    with copies_end_at_waits() as were_alive:
        together(kernels(), 1)
    assert were_alive == [True] * (3 * 4 * WORLD * WORLD)


def test_control_with_a_part_that_never_leaves_fails() -> None:
    num_calls = iter(range(10**6))

    def forgetful(target_RC: Tensor, source_RC: Tensor) -> None:
        if next(num_calls) != 7:
            copy_rows(target_RC, source_RC)

    with patch("engines.torch_engine.exchange.peer_memory.copy_rows", forgetful):
        result = together(kernels(), seed=1)
    assert not torch.allclose(result, plain_attention(*qkv(1))[0])


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        (1, ["queries 0", 1, "results 0"]),
        (2, ["queries 0", 1, "queries 1", 1, "results 0"]),
        (6, ["queries 0", 1, "queries 1", 4, 1, "results 0"]),
    ],
)
def test_no_barrier_waits_while_a_long_part_starts(heads: int, expected: list[object]) -> None:
    """``expected`` has the first rank's calls in order: barriers, and the number of heads in each attended part."""
    memory, calls = ThreadMemory(), list[object]()

    def open_memory(numel: int, sample: Tensor, axis: Axis, *, use: str) -> Any:
        opened = memory.open(numel, sample, axis, use=use)

        def barrier(channel: int) -> None:
            calls.extend([f"{use.split()[0]} {channel}"] * (axis.index == 0))
            opened.barrier(channel)

        return SimpleNamespace(local=opened.local, views_W=opened.views_W, barrier=barrier)

    def attend(rank: int, q: Tensor, k: Tensor, v: Tensor, _: None) -> Tensor:
        calls.extend([q.shape[2]] * (rank == 0))
        return plain_attention(q, k, v)[0]

    with patch("engines.torch_engine.exchange.peer_attention.PeerMemory", SimpleNamespace(open=open_memory)):
        together([peer_ulysses(partial(attend, rank), axis_of(rank), CPU) for rank in range(WORLD)], 1, heads)
    assert calls == expected


def test_the_long_part_goes_first_in_a_graph_too() -> None:
    """The stream on which a graph is captured has a priority of its own. Lower ones run first."""
    with patch.object(graph, "named_stream") as graphs, patch("torch.cuda.graph_pool_handle"):
        GraphPool(torch.device("cuda", 0))
    with patch("engines.fast.interface.named_stream") as ours:
        PeerUlysses(masked_attention_of(plain_attention), axis_of(0), torch.device("cuda", 0))
    (long,) = (call.args[2] for call in ours.call_args_list if call.args[1] == "every other part")
    assert long < graphs.call_args.kwargs["priority"]


@pytest.mark.parametrize(
    ("heads", "key_heads", "sizes"),
    [(1, 1, [1]), (2, 2, [1, 1]), (3, 3, [1, 1, 1]), (10, 10, [1, 8, 1]), (8, 2, [1, 1]), (12, 4, [1, 2, 1])],
)
def test_first_and_last_part_are_single_key_heads(heads: int, key_heads: int, sizes: list[int]) -> None:
    parts = parts_of(heads, key_heads)
    assert [part.keys.stop - part.keys.start for part in parts] == sizes
    assert (parts[0].keys.start, parts[-1].keys.stop) == (0, key_heads)
    each = heads // key_heads
    assert [part.queries for part in parts] == [slice(each * part.keys.start, each * part.keys.stop) for part in parts]


def test_a_compiler_sees_one_operation() -> None:
    kernel = peer_ulysses(masked_attention_of(plain_attention), axis_of(0, world=1), CPU)
    targets: list[Any] = []

    def backend(module: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., Any]:
        targets.extend(node.target for node in module.graph.nodes if node.op == "call_function")
        return module.forward

    compiled = torch.compile(lambda q, k, v: kernel(q, k, v)[0], backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(*qkv(1)), plain_attention(*qkv(1))[0])
    assert targets == [torch.ops.troupe.peer_attention.default]


def test_another_number_of_heads_is_our_mistake() -> None:
    (kernel, *_) = kernels()
    four, six = (torch.zeros(1, 3, heads, 8) for heads in (4, 6))
    for q, k in ((six, four), (four, six)):
        with pytest.raises(AssertionError, match="6 heads cannot be divided over 4 ranks"):
            kernel(q, k, k)
