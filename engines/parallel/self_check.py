"""Self-check: one known step on every team of a gang, compared with one rank. A wrong answer is an error.

Collectives inside an engine have become silent no-ops in other projects. The resulting picture still looks plausible at
a glance.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import Tensor

from engines.core.engine import Engine
from engines.core.layout import Rows, TokenLayout
from engines.core.model import Branch
from engines.core.tensors import relative_difference
from engines.parallel.key_rows import forward_over
from engines.parallel.local_attention import local_kernel, take_rows
from engines.parallel.mesh import Team
from engines.parallel.strategies import MakeKernel, team_kernel

T = TypeVar("T")

SKIPPED = "self-check of the model is skipped: no step is known"

logger = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Relative error (2-norm) that rounding explains, by dtype of the prediction. A missing exchange costs far more."""


class WrongAnswerError(RuntimeError):
    """A team's answer differs from one rank's. No result of this team can be trusted."""

    def __init__(self, ranks: tuple[int, ...], strategy: str, difference: float, allowed: float) -> None:
        super().__init__(ranks, strategy, difference, allowed)
        self.ranks, self.strategy, self.difference, self.allowed = ranks, strategy, difference, allowed

    def __str__(self) -> str:
        return (
            f"ranks {self.ranks} with strategy {self.strategy} differ from one rank alone by {self.difference:.2g} "
            f"(relative; {self.allowed:.2g} is allowed): an exchange between them does not work"
        )


def self_check(
    engine: Engine,
    branches: tuple[Branch, ...],
    *,
    rank: int,
    teams: Iterable[tuple[tuple[int, ...], str]],
    at_once: int = 1,
    num_runs: int = 1,
    tolerance: float | None = None,
) -> dict[str, float]:
    """Run ``branches`` (one alone, two, and so on) on every team of the caller and compare with one rank.

    ``teams`` are (ranks, strategy). Branches are repeated up to ``at_once``, the most that teams run together.
    ``num_runs``: runs of each, for an engine whose later runs use other code (captured graphs) than the first.
    ``tolerance`` replaces ``TOLERANCE``, for differences beyond rounding in the prediction's dtype.

    Return the relative difference per team; none without branches (the model has no known step). Raise
    ``WrongAnswerError``. Every rank of the gang makes the call with its own teams, in the same order.
    """
    if not branches:
        logger.warning(SKIPPED, extra={"rank": rank})
        return {}
    alone = engine.predict(branches, (rank,))
    max_branches = max(len(branches), at_once)
    branches, alone = repeat_to(branches, max_branches), repeat_to(alone, max_branches)
    differences: dict[str, float] = {}
    for ranks, strategy in teams:
        for num in num_runs * list(range(1, max_branches + 1)):
            together = engine.predict(branches[:num], ranks)
            difference = max(map(relative_difference, together, alone))  # map stops at the shorter
            allowed = tolerance or TOLERANCE.get(alone[0].dtype, 1e-4)
            if not difference <= allowed:
                raise WrongAnswerError(ranks, strategy, difference, allowed)
            differences[f"{ranks} {strategy}"] = max(difference, differences.get(f"{ranks} {strategy}", 0.0))
    logger.info("self-check passed", extra={"rank": rank, "differences": differences})
    return differences


def repeat_to(several: Iterable[T], num: int) -> tuple[T, ...]:
    """Return ``num`` items: those of ``several``, repeated from the start if they are fewer."""
    return tuple(itertools.islice(itertools.cycle(several), num))


def check_attention(
    team: Team,
    *,
    num_heads: int,
    head_dim: int,
    device: torch.device,
    dtype: torch.dtype,
    make_kernel: MakeKernel = team_kernel,
) -> float:
    """Compare the team's attention of fixed queries, keys and values with one rank's; works even with weights of 0.

    Return the relative difference; raise ``WrongAnswerError``. Every rank of the team makes the call.
    """
    layout = TokenLayout(lengths=(("short", 3), ("long", 8 * team.context.size - 3)), num_chunks=team.context.size)
    generator = torch.Generator().manual_seed(20251122)
    heads = num_heads // team.tensor.size
    whole = [torch.randn(1, layout.num_tokens, heads, head_dim, generator=generator) for _ in "qkv"]
    q_BLHD, k_BLHD, v_BLHD = (x.to(device, dtype) for x in whole)
    local = local_kernel(device, dtype)
    expected = _rank_rows(local(q_BLHD, k_BLHD, v_BLHD)[0], layout, team)
    shards = (_rank_rows(x, layout, team) for x in (q_BLHD, k_BLHD, v_BLHD))
    rows = layout.valid_rows(team.context.index, 1)
    with forward_over(layout):
        actual = make_kernel(local, team, layout)(*shards)[0]
    difference = relative_difference(crop(actual, rows), crop(expected, rows))
    allowed = TOLERANCE.get(dtype, 1e-4)
    if not difference <= allowed:
        raise WrongAnswerError(team.ranks, team.spec.name, difference, allowed)
    return difference


def _rank_rows(x_BLHD: Tensor, layout: TokenLayout, team: Team) -> Tensor:
    """Return what this rank holds of a whole tensor: its chunk of each stream, one after another."""
    streams = torch.split(x_BLHD, [length for _, length in layout.lengths], dim=1)
    names = [name for name, _ in layout.lengths]
    pieces = [
        layout.cut(x, dim=1, stream=name, index=team.context.index) for name, x in zip(names, streams, strict=True)
    ]
    return torch.cat(pieces, dim=1)


def crop(x_BLHD: Tensor, rows: Rows | None) -> Tensor:
    return x_BLHD if rows is None else take_rows(x_BLHD, rows)
