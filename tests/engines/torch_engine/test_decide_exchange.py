"""How ranks exchange heads is decided beside the strategy, by steps that are timed, where there is a choice."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from engines.parallel.attention.ulysses import ulysses_in_parts
from engines.planner.exchange_rules import ExchangeRules
from engines.torch_engine.engine import TorchEngine
from engines.torch_engine.exchange.alternatives import DividedForward, alternatives
from engines.torch_engine.fast_step import SideStream
from engines.torch_engine.options import TorchOptions
from tests.engines.support import models
from tests.engines.support.gloo import gang
from tests.engines.torch_engine.support.decisions import EVERYONE, Started, Times, choice_of_exchange, choosing, start
from tests.engines.torch_engine.support.teams import team_of

NUM_TOKENS = {"even": 40, "uneven": 34}
"""Of the two steps of the model; the first is the typical one."""
ULYSSES_MS = {"ring2": 71.4, "allgather_kv2": 71.4, "ulysses2": 55.0}
IN_PARTS = f"in parts from {NUM_TOKENS['even']} tokens"
NO_MEMORY, NO_STREAMS = "without peer memory", "without side streams"
USUAL = ExchangeRules()
NUM_STARTS = 10


def decided(folder: Path, fast: bool, exchange: dict[str, float], options: TorchOptions | None = None) -> ExchangeRules:
    """What a gang without a decision takes, where ways that are unusual take so many times what the usual one does."""
    times = Times(strategies_ms=ULYSSES_MS, exchange=exchange)
    with choice_of_exchange(fast=fast):
        started = start(choosing(folder), 1, times, options)
    assert started.strategy == "ulysses2"
    return started.exchange


@pytest.mark.parametrize(
    ("fast", "exchange", "expected"),
    [
        (False, {IN_PARTS: 0.8}, ExchangeRules(parts_from_tokens=40)),
        (
            False,
            {IN_PARTS: 0.8, f"{NO_MEMORY}, {IN_PARTS}": 0.7},
            ExchangeRules(peer_memory=False, parts_from_tokens=40),
        ),
        (True, {NO_MEMORY: 0.8}, ExchangeRules(peer_memory=False)),
        (True, {NO_STREAMS: 0.8}, ExchangeRules(side_streams=False)),
        (True, {NO_MEMORY: 0.8, f"{NO_MEMORY}, {NO_STREAMS}": 0.9}, ExchangeRules(peer_memory=False)),
    ],
)
def test_what_is_faster_is_taken(
    fast: bool, exchange: dict[str, float], expected: ExchangeRules, tmp_path: Path
) -> None:
    assert gang(2).run(decided, tmp_path, fast, exchange) == [expected] * 2


@pytest.mark.parametrize("fast", [False, True])
def test_within_the_noise_it_stays_as_usual(fast: bool, tmp_path: Path) -> None:
    every = dict.fromkeys([IN_PARTS, NO_MEMORY, NO_STREAMS], 1.0)
    assert gang(2).run(decided, tmp_path, fast, every) == [USUAL] * 2


def at_odds(folder: Path) -> ExchangeRules:
    """One rank gains what the other one loses."""
    return decided(folder, False, {IN_PARTS: 0.5 if dist.get_rank() else 1.5})


def test_ranks_whose_times_differ_decide_alike(tmp_path: Path) -> None:
    assert gang(2).run(at_odds, tmp_path) == [USUAL] * 2, "by the slowest rank"


def starts(folder: Path, num_starts: int, num_folders: int) -> list[Started]:
    """Gangs one after the other, of which so many have a folder of their own; each time another way is faster."""
    with choice_of_exchange(fast=False):
        return [
            start(
                choosing(folder / str(number % num_folders)),
                number,
                Times(strategies_ms=ULYSSES_MS, exchange={IN_PARTS: 0.8 if number % 2 else 1.2}),
            )
            for number in range(num_starts)
        ]


def test_a_gang_that_is_rebuilt_ten_times_decides_once_and_makes_one_picture(tmp_path: Path) -> None:
    mine, others = gang(2).run(starts, tmp_path, NUM_STARTS, 1)
    assert mine == others
    assert [replace(each, num_timed=0) for each in mine] == [replace(mine[0], num_timed=0)] * NUM_STARTS
    assert [each.num_timed > 0 for each in mine] == [True] + [False] * (NUM_STARTS - 1)


def test_without_what_was_kept_it_would_not(tmp_path: Path) -> None:
    mine, _ = gang(2).run(starts, tmp_path, 2, 2)
    assert [each.exchange for each in mine] == [USUAL, ExchangeRules(parts_from_tokens=40)]


@pytest.mark.parametrize("peer_memory", [True, False])
def test_what_is_configured_is_not_tried(peer_memory: bool, tmp_path: Path) -> None:
    options = TorchOptions(peer_memory=peer_memory)
    faster = {NO_MEMORY: 0.5} if peer_memory else {"as usual": 0.5}
    rules = gang(2).run(decided, tmp_path, True, faster, options)
    assert rules == [ExchangeRules(peer_memory=peer_memory)] * 2


def left_open_and_then_not(folder: Path) -> list[bool]:
    """Gangs one after the other, of which the first decides against peer memory, and the second is told to use it."""
    options = (None, TorchOptions(peer_memory=True), None)
    return [decided(folder, True, {NO_MEMORY: 0.8}, each).peer_memory for each in options]


def test_what_is_configured_counts_more_than_what_was_kept(tmp_path: Path) -> None:
    assert gang(2).run(left_open_and_then_not, tmp_path) == [[False, True, False]] * 2


def read_again(folder: Path, exchange: Any) -> tuple[dict[str, Any], Started]:
    """What a gang keeps, and one that starts beside it with these rules of exchange in its place; "older": none."""
    times = Times(strategies_ms=ULYSSES_MS, exchange={IN_PARTS: 0.8})
    with choice_of_exchange(fast=False):
        start(choosing(folder), 1, times)
        (file,) = folder.glob("tiny_*.json")
        kept: dict[str, Any] = json.loads(file.read_text())
        dist.barrier()
        if dist.get_rank() == 0:
            rest = {name: value for name, value in kept.items() if name != "exchange"}
            file.write_text(json.dumps(rest if exchange == "older" else {**rest, "exchange": exchange}))
        dist.barrier()
        return kept, start(choosing(folder), 2, times)


def test_a_file_of_before_is_followed_as_it_was(tmp_path: Path) -> None:
    (kept, started), _ = gang(2).run(read_again, tmp_path, "older")
    assert kept["exchange"] == {"peer_memory": True, "side_streams": True, "parts_from_tokens": 40}
    assert f"ulysses2 on 2, branches: 1, exchange {IN_PARTS}" in kept["times_ms"]
    assert (started.strategy, started.exchange, started.num_timed) == ("ulysses2", USUAL, 0)


@pytest.mark.parametrize("exchange", [{"peer_memory": "no"}, {"parts_from_tokens": 1.5}, {"lanes": 2}])
def test_a_file_with_other_rules_is_no_use(exchange: Any, tmp_path: Path) -> None:
    (_, started), _ = gang(2).run(read_again, tmp_path, exchange)
    assert started.num_timed
    assert started.exchange == ExchangeRules(parts_from_tokens=40)


def kernels_of(rules: ExchangeRules) -> list[int]:
    """How many kernels in parts an engine has made after a step of either length, by ``rules`` and then as usual."""
    made: list[int] = []

    def counted(*args: Any) -> Any:
        made.append(1)
        return ulysses_in_parts(*args)

    counts = []
    with (
        patch("engines.parallel.attention.strategy.ulysses_in_parts", counted),
        closing(TorchEngine(models.model("flux"), strategy="ulysses")) as engine,
    ):
        for each in (rules, USUAL):
            engine.use(each)
            for length in NUM_TOKENS:
                engine.predict(models.branches("flux", length), EVERYONE)
                counts.append(len(made))
    return counts


def test_an_engine_with_its_weights_goes_over_to_other_rules() -> None:
    """From as many tokens on as they say, and back again."""
    assert gang(2).run(kernels_of, ExchangeRules(parts_from_tokens=NUM_TOKENS["even"])) == [[1, 1, 1, 1]] * 2
    assert gang(2).run(kernels_of, ExchangeRules(parts_from_tokens=1)) == [[1, 2, 2, 2]] * 2


def streams_of(rules: ExchangeRules) -> dict[int, list[tuple[str, bool]]]:
    """The side streams of steps over two ranks and over one, and whether these are in use."""
    used: list[tuple[str, bool]] = []

    def noted(device: torch.device, name: str, *, in_use: bool = True) -> SideStream:
        used.append((name, in_use))
        return SideStream(device, name, in_use=in_use)

    by_size = {}
    with (
        patch("engines.torch_engine.fast_step.SideStream", noted),
        closing(TorchEngine(models.model("flux"), strategy="ulysses", fast=True)) as engine,
    ):
        engine.use(rules)
        for ranks in (EVERYONE, (dist.get_rank(),)):
            engine.predict(models.branches("flux", "even"), ranks)
            by_size[len(ranks)], used[:] = list(used), []
    return by_size


def test_side_streams_are_of_teams_alone() -> None:
    """One rank goes on as it did."""
    alone = [("stream", True), ("mlp", False)]
    for in_use in (True, False):
        expected = {2: [("stream", in_use), ("mlp", in_use)], 1: alone}
        assert gang(2).run(streams_of, ExchangeRules(side_streams=in_use)) == [expected] * 2


def divided(
    *, ulysses: int = 2, ring: int = 1, gather: int = 1, fast: bool = False, even: bool = True, num_tokens: int = 40
) -> DividedForward:
    team = team_of(ulysses=ulysses, ring=ring, allgather_kv=gather)
    return DividedForward(team=team, num_tokens=num_tokens, is_fast=fast, is_even=even)


def changes(each: DividedForward, rules: ExchangeRules = USUAL, peer_memory: bool = True) -> list[str | None]:
    """What each alternative in turn makes of ``rules``."""
    where = "engines.torch_engine.exchange.alternatives"
    with (
        patch(f"{where}.reachable", lambda *_: True),
        patch(f"{where}.runs_beside", lambda _: True),
        patch("engines.torch_engine.agreement.dist.all_reduce", lambda *_, **__: None),
    ):
        several = alternatives((each,), torch.device("cpu"), torch.float32, peer_memory=peer_memory)
        return [None if (changed := change(rules)) is None else changed.describe() for change in several]


def test_only_what_would_change_the_step_is_tried() -> None:
    long, in_parts = 20_000, ExchangeRules(parts_from_tokens=40)
    assert changes(divided()) == ["in parts from 40 tokens", None, None]
    assert changes(divided(), in_parts)[1:] == [f"{NO_MEMORY}, in parts from 40 tokens", None]
    assert changes(divided(num_tokens=long)) == [f"in parts from {long + 1} tokens", NO_MEMORY, None]
    assert changes(divided(num_tokens=long), peer_memory=False) == [f"in parts from {long + 1} tokens", None, None]
    assert changes(divided(num_tokens=long, even=False))[1] is None
    assert changes(divided(fast=True)) == [None, NO_MEMORY, NO_STREAMS]
    assert changes(divided(fast=True, ring=2)) == [None, None, NO_STREAMS]
    assert changes(divided(fast=True, ulysses=1, ring=2)) == [None, None, NO_STREAMS]
    assert changes(divided(fast=True, ulysses=1)) == [None, None, None]
    assert changes(divided(ulysses=1, ring=2)) == [None, None, None]
    assert changes(divided(ulysses=1, gather=2)) == [None, None, None]
    assert changes(divided(ulysses=1, gather=2, num_tokens=long)) == [None, NO_MEMORY, None]
    assert changes(divided(ulysses=2, gather=2, num_tokens=long))[1] is None
    assert changes(divided(ulysses=1, gather=2, num_tokens=long, fast=True))[1] is None


def test_a_cpu_has_no_choice() -> None:
    assert alternatives((divided(),), torch.device("cpu"), torch.float32, peer_memory=True) == ()
