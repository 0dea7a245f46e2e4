"""Teams write into each other's memory where they can, in one of two ways."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from engines.core.attention import EarlyKernel, Prefix
from engines.core.layout import TokenLayout
from engines.core.resources import rank_resources
from engines.parallel.key_rows import forward_over
from engines.parallel.local_attention import plain_attention
from engines.parallel.mesh import Team
from engines.torch_engine.exchange.choose import ExchangeRules, PeerKernels, kernel_by_length
from engines.torch_engine.exchange.heads import MaskedAttend
from tests.engines.torch_engine.support.teams import team_of
from tests.engines.torch_engine.support.thread_memory import CPU

WHERE = "engines.torch_engine.exchange.choose"
LAYOUT = TokenLayout(lengths=(("text", 8), ("clip", 20)), num_chunks=4)


@pytest.fixture(autouse=True)
def peers_within_reach() -> Iterator[None]:
    """Replace the kernels by ones that return their names."""

    def named(name: str) -> Any:
        return lambda *_, **__: lambda *_, **__: (name, None)

    ways = {name: named(name) for name in ("peer_ulysses", "peer_allgather_kv", "team_kernel")}
    with patch.multiple(WHERE, **ways, reachable=lambda *_: True):
        forget_kernels()
        yield
    forget_kernels()


def forget_kernels() -> None:
    kernel_by_length.cache_clear()
    rank_resources().get(PeerKernels).clear()


def chosen(team: Team, rules: ExchangeRules, **options: Any) -> str:
    x = torch.zeros(1, 7, 8, 4)
    kernel: Any = kernel_by_length(rules, CPU, torch.float32)(plain_attention, team, LAYOUT)
    return str(kernel(x, x, x, **options)[0])


LONG = ExchangeRules(parts_from_tokens=28)


def test_long_steps_of_one_strategy_share_memory() -> None:
    assert chosen(team_of(ulysses=4), LONG) == "peer_ulysses"
    assert chosen(team_of(allgather_kv=4), LONG) == "peer_allgather_kv"


def test_padding_is_left_out_with_a_mask_and_without() -> None:
    """Five and six tokens on four ranks: two each, and one or none on the last two. One kernel serves both."""
    attends = list[MaskedAttend]()
    with patch(f"{WHERE}.peer_ulysses", lambda attend, *_: attends.append(attend)):
        for num_tokens in (6, 5):
            layout = TokenLayout(lengths=(("clip", num_tokens),), num_chunks=4)
            kernel_by_length(replace(LONG, parts_from_tokens=5), CPU, torch.float32)(
                plain_attention, team_of(ulysses=4), layout
            )
            q, k, v = torch.randn(3, 1, 8, 2, 4).unbind()
            for mask_BM in (None, torch.arange(8)[None] % 3 > 0):
                masks = None if mask_BM is None else mask_BM[:, :num_tokens]
                expected = plain_attention(q, k[:, :num_tokens], v[:, :num_tokens], mask_BM=masks)[0]
                with forward_over(layout):
                    torch.testing.assert_close(attends[0](q, k, v, mask_BM), expected)
    assert len(attends) == 1


def test_only_gathered_keys_can_travel_before_queries_are_made() -> None:
    """The team's kernel sends them like its attention, without mask and prefix."""
    early = EarlyKernel(attend=lambda *_, **__: ("early", None), send=lambda *_: lambda _: torch.ones(1))  # type: ignore[arg-type]
    with patch(f"{WHERE}.peer_allgather_kv", lambda *_: early):
        kernel = kernel_by_length(LONG, CPU, torch.float32)(plain_attention, team_of(allgather_kv=4), LAYOUT)
        assert isinstance(kernel, EarlyKernel)
        assert kernel.send is early.send
        assert chosen(team_of(allgather_kv=4), LONG) == "early"
    assert not isinstance(
        kernel_by_length(LONG, CPU, torch.float32)(plain_attention, team_of(ulysses=4), LAYOUT), EarlyKernel
    )


@pytest.mark.parametrize("rules", [ExchangeRules(), replace(LONG, peer_memory=False)], ids=["short", "NCCL"])
@pytest.mark.parametrize("axis", ["ulysses", "allgather_kv"])
def test_short_steps_and_those_that_may_not_exchange_as_all(axis: str, rules: ExchangeRules) -> None:
    assert chosen(team_of(**{axis: 4}), rules) == "team_kernel"


@pytest.mark.parametrize(
    "sizes", [{"ring": 4}, {"ulysses": 2, "ring": 2}, {"ulysses": 2, "allgather_kv": 2}, {"ulysses": 1}], ids=str
)
def test_several_strategies_do_not(sizes: dict[str, int]) -> None:
    assert chosen(team_of(**sizes), LONG) == "team_kernel"


@pytest.mark.parametrize("axis", ["ulysses", "allgather_kv"])
def test_prefixes_are_for_the_others(axis: str) -> None:
    prefix = Prefix(torch.ones(7, dtype=torch.int32), torch.zeros(7, dtype=torch.int32))
    assert chosen(team_of(**{axis: 4}), LONG, prefix=prefix) == "team_kernel"
    mask_BM = torch.ones(1, 7, dtype=torch.bool)
    assert chosen(team_of(**{axis: 4}), LONG, mask_BM=mask_BM) == f"peer_{axis}"
