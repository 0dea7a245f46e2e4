"""Strategies agree with one rank on grouped key heads, masked keys, a causal prefix and uneven heads.

The expected result is plain attention in float32, written out below. A gang computes all cases in one call.
"""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch
from torch import Tensor

from tests.engines.parallel.support.kernel_cases import (
    CASES,
    DIM,
    STRATEGIES,
    Case,
    compiled,
    every_answer,
    mask_of,
    my_rows,
    prefix_of,
    qkv,
    sizes_sent,
)
from tests.engines.support.gloo import gang

EVERY = [(num_ranks, *pair) for num_ranks in STRATEGIES for pair in itertools.product(STRATEGIES[num_ranks], CASES)]


@cache
def answers_of(num_ranks: int, broken: str = "") -> list[dict[tuple[str, str], tuple[Tensor, Tensor]]]:
    return gang(num_ranks).run(every_answer, num_ranks, broken)


def plain(case: Case) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of all tokens on one rank."""
    q_BLHD, k_BMGD, v_BMGD = qkv(case)
    k_BMHD, v_BMHD = (x.repeat_interleave(case.heads // case.key_heads, dim=2) for x in (k_BMGD, v_BMGD))
    scores_BHLM = torch.einsum("blhd,bmhd->bhlm", q_BLHD, k_BMHD) / DIM**0.5
    mask_BM, prefix = mask_of(case), prefix_of(case)
    if mask_BM is not None:
        scores_BHLM[~mask_BM[:, None, None].expand_as(scores_BHLM)] = -torch.inf
    for query, reach in enumerate(prefix.reach_L if prefix else ()):
        scores_BHLM[:, :, query, reach:] = -torch.inf
    return torch.einsum("bhlm,bmhd->blhd", scores_BHLM.softmax(-1), v_BMHD), scores_BHLM.logsumexp(-1)


@pytest.mark.parametrize(("num_ranks", "strategy", "name"), EVERY)
def test_equals_one_rank(num_ranks: int, strategy: str, name: str) -> None:
    expected_BLHD, lse_BHL = plain(CASES[name])
    for rank, answers in enumerate(answers_of(num_ranks)):
        mine, lse = answers[strategy, name]
        torch.testing.assert_close(mine, my_rows(expected_BLHD, num_ranks, rank), rtol=0, atol=2e-6)
        if lse.numel():
            expected_lse_BLH = my_rows(lse_BHL.mT, num_ranks, rank)
            torch.testing.assert_close(lse.mT, expected_lse_BLH, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("strategy", "name"), [*itertools.product(STRATEGIES[4], CASES)])
def test_control_with_an_exchange_left_out_fails(strategy: str, name: str) -> None:
    assert worst_error(strategy, name, broken="exchange") > 0.01


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.masked or case.causal])
@pytest.mark.parametrize("strategy", STRATEGIES[4])
def test_control_with_masks_and_places_left_where_they_are_fails(strategy: str, name: str) -> None:
    assert worst_error(strategy, name, broken="masks") > 0.01


def worst_error(strategy: str, name: str, broken: str) -> float:
    expected_BLHD, _ = plain(CASES[name])
    answers = enumerate(answers_of(4, broken))
    errors = [(each[strategy, name][0] - my_rows(expected_BLHD, 4, rank)).abs().max() for rank, each in answers]
    return float(torch.stack(errors).nan_to_num(torch.inf).max())


@pytest.mark.parametrize(
    ("strategy", "heads_sent"),
    [
        ("ulysses", {"grouped": 8 + 2 * 4, "fewer key heads than ranks": 8 + 2 * 4, "uneven": 3 * 8, "plain": 3 * 8}),
        ("ulysses in parts", {"grouped": 8 + 2 * 4, "uneven": 3 * 8, "plain": 3 * 8}),
        ("ring", {"grouped": 2 * 4, "fewer key heads than ranks": 2, "uneven": 2 * 5}),
        ("allgather_kv", {"grouped": 2 * 4, "fewer key heads than ranks": 2, "uneven": 2 * 5}),
    ],
)
def test_no_more_heads_travel_than_needed(strategy: str, heads_sent: dict[str, int]) -> None:
    for sent in gang(4).run(sizes_sent, strategy, tuple(heads_sent)):
        assert sent == heads_sent


@pytest.mark.parametrize("strategy", ["ulysses", "ulysses in parts", "ring", "allgather_kv"])
@pytest.mark.parametrize("name", ["uneven, grouped and masked", "causal, uneven, grouped and masked"])
def test_a_compiler_sees_one_graph(strategy: str, name: str) -> None:
    expected_BLHD, _ = plain(CASES[name])
    for rank, mine in enumerate(gang(2).run(compiled, strategy, name)):
        torch.testing.assert_close(mine, my_rows(expected_BLHD, 2, rank), rtol=0, atol=2e-6)
