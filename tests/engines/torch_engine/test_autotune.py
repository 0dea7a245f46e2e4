"""Timed steps decide strategy "auto" once, and later starts of the gang have the same decision."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from torch import nn

from engines.core.engine import RankContext
from engines.core.host_copy import TouchedMemory
from engines.core.model import DenoiserModel
from engines.core.resources import rank_resources
from engines.core.spec import ParallelSpec
from engines.parallel.ulysses import ulysses_in_parts
from engines.planner.cost_model import Cost
from engines.registry import load_engine
from engines.torch_engine import autotune
from engines.torch_engine.autotune import (
    EXCHANGE_FIELDS,
    MIN_BLOCKS,
    NUM_TIMED,
    NUM_TIMED_LONG,
    Autotuner,
    DividedForward,
    GangLock,
    alternative,
    is_exchange_negligible,
    model_to_time,
    overlaps,
)
from engines.torch_engine.config import TorchChoices
from engines.torch_engine.decision import Decision, DecisionFile
from engines.torch_engine.engine import TorchEngine
from engines.torch_engine.exchange.choose import ExchangeRules
from engines.torch_engine.options import TorchOptions
from tests.engines.support import models
from tests.engines.support.gloo import gang
from tests.engines.torch_engine.support import decisions
from tests.engines.torch_engine.support.decisions import (
    EVERYONE,
    STRATEGIES_MS,
    Started,
    Times,
    choice_of_exchange,
    choosing,
    start,
)
from tests.engines.torch_engine.support.teams import team_of

MEASURED = Times(strategies_ms=STRATEGIES_MS)
SWAPPED = Times(strategies_ms={**STRATEGIES_MS, "ring2": 50.0})
ULYSSES_MS = {"ring2": 71.4, "allgather_kv2": 71.4, "ulysses2": 55.0}
NUM_TOKENS = {"even": 40, "uneven": 34}
"""Tokens of the model's two steps; the first is the typical one."""
IN_PARTS = f"in parts from {NUM_TOKENS['even']} tokens"
NO_MEMORY, NO_STREAMS = "without peer memory", "without side streams"
USUAL = ExchangeRules()

# The decision, which stays.


def starts(folder: Path, several: list[Times], num_folders: int) -> list[Started]:
    """Start gangs one after the other, in ``num_folders`` folders; each measures other times."""
    with ExitStack() as stack:
        if any(times.exchange for times in several):
            stack.enter_context(choice_of_exchange(fast=False))
        return [start(choosing(folder / str(i % num_folders)), i, times) for i, times in enumerate(several)]


EXCHANGES = [Times(strategies_ms=ULYSSES_MS, exchange={IN_PARTS: share}) for share in (1.2, 0.8, 1.2)]


@pytest.mark.parametrize("several", [[MEASURED, SWAPPED, MEASURED], EXCHANGES], ids=["strategy", "exchange"])
def test_a_rebuilt_gang_follows_the_first_decision_and_makes_the_same_picture(
    several: list[Times], tmp_path: Path
) -> None:
    mine, others = gang(2).run(starts, tmp_path, several, 1)
    assert mine == others
    first, *rest = mine
    assert first.num_timed > 0
    assert rest == [replace(first, num_timed=0)] * len(rest)
    assert first.strategy == ("ulysses2" if several is EXCHANGES else "allgather_kv2"), "the timed choice"
    assert first.estimates is not None, "stored with the decision"
    assert sorted(first.estimates.step_s(100, 1)) == [1, 2]


def test_without_the_file_the_strategy_and_the_picture_would_change(tmp_path: Path) -> None:
    mine, _ = gang(2).run(starts, tmp_path, [MEASURED, SWAPPED], 2)
    assert [each.strategy for each in mine] == ["allgather_kv2", "ring2"]
    assert len({each.picture for each in mine}) == 2


def test_without_the_file_the_exchange_would_change(tmp_path: Path) -> None:
    mine, _ = gang(2).run(starts, tmp_path, EXCHANGES[:2], 2)
    assert [each.exchange for each in mine] == [USUAL, ExchangeRules(parts_from_tokens=40)]


def test_ties_within_the_noise_are_broken_by_name(tmp_path: Path) -> None:
    equal = Times(strategies_ms=dict.fromkeys(STRATEGIES_MS, 60.19))
    for each in gang(2).run(starts, tmp_path, [equal] * 3, 3):
        assert [started.strategy for started in each] == ["allgather_kv2"] * 3


def of_long_steps(folder: Path, guidance_ms: float) -> Started:
    """Return a start with steps of a minute, of one and two branches. All candidates are near enough to be timed."""
    one_ms = {"ring2": 71_400.0, "allgather_kv2": 61_600.0, "ulysses2": 71_400.0}
    times = Times(strategies_ms={**one_ms, "guidance2": guidance_ms})
    with patch("engines.planner.forecast.TRIAL_MARGIN", 100.0), patch.object(decisions, "JITTER", 0.0):
        return start(choosing(folder, num_branches=2), 1, times)


@pytest.mark.parametrize(
    ("guidance_ms", "at_once"),
    [(150_000.0, "allgather_kv2"), (122_600.0, "allgather_kv2"), (121_400.0, "guidance2")],
    ids=["slower", "within the noise of long steps", "faster by less than the noise of short ones"],
)
def test_long_steps_are_timed_once_and_branches_in_turn_never(guidance_ms: float, at_once: str, tmp_path: Path) -> None:
    for found in gang(2).run(of_long_steps, tmp_path, guidance_ms):
        assert (found.strategy, found.at_once) == ("allgather_kv2", at_once)
        assert found.num_timed == len(("ring2", "allgather_kv2", "ulysses2", "guidance2"))


@pytest.mark.parametrize(("step_s", "num_timed"), [(0.2, 1 + NUM_TIMED), (0.6, 1)])
def test_a_capture_makes_no_step_long(step_s: float, num_timed: int) -> None:
    """A capture runs the step several times."""
    engine, times_s = Mock(device=torch.device("cpu")), list[float]()

    def timed_s(*_: Any) -> float:
        times_s.append(step_s if engine.warm_up.called or times_s else 4 * step_s)
        return times_s[-1]

    tuner = Autotuner(models.model("flux"), engine, (), {}, GangLock(None))
    with patch.object(autotune, "_timed_s", timed_s), patch.object(dist, "all_reduce"):
        assert tuner._time_s((), (0,)) == pytest.approx(step_s)
    assert len(times_s) == num_timed


ALL_NEAR = Times(strategies_ms={"ring2": 714.0, "allgather_kv2": 616.0, "ulysses2": 714.0, "guidance2": 500.0})


def of_few_blocks(folder: Path, long_step_s: float) -> tuple[Started, list[int]]:
    """Return a start of a model of four blocks with steps of two branches, and the blocks run per trial."""
    calls, per_trial = list[nn.Module](), list[int]()
    memory = rank_resources().get(TouchedMemory)
    forward, time_s = WanTransformerBlock.forward, Autotuner._time_s

    @wraps(forward)
    def recorded(block: WanTransformerBlock, *args: Any) -> Any:
        calls.append(block)
        return forward(block, *args)

    def counted(tuner: Autotuner, *args: Any) -> float:
        calls.clear()
        time = time_s(tuner, *args)
        per_trial.append(len(calls))
        return time

    with (
        patch("engines.planner.forecast.TRIAL_MARGIN", 100.0),
        patch.object(autotune, "LONG_STEP_S", long_step_s),
        patch.object(WanTransformerBlock, "forward", recorded),
        patch.object(Autotuner, "_time_s", counted),
        patch.object(autotune, "touch_copies", side_effect=lambda _: memory.prepare(1)) as touch,
    ):
        step, additions = choosing(folder, 2, "wan"), () if long_step_s > 1 else (("of no trial", 1.0),)
        branches = tuple(replace(branch, additions=additions) for branch in step.typical_step())
        options, step = TorchOptions(originals_on_host=True), replace(step, typical_step=lambda: branches)
        started = start(step, 1, ALL_NEAR, options, family="wan")
    assert touch.call_count == (long_step_s < 1), "while blocks are timed, which have no copies"
    assert memory.num_bytes == 0, "unused memory is released"
    return started, per_trial


def few_blocks_and_all(folder: Path) -> list[tuple[Started, list[int]]]:
    return [of_few_blocks(folder / str(long_step_s), long_step_s) for long_step_s in (1e-9, 1e9)]


def test_a_long_step_is_timed_on_few_blocks_with_the_same_decision(tmp_path: Path) -> None:
    """Each rank computes one branch of ``guidance2``. Only in short steps are branches timed one after the other."""
    mine, others = gang(2).run(few_blocks_and_all, tmp_path)
    assert mine == others
    (few, blocks_of_few), (every, blocks_of_all) = mine
    assert blocks_of_few == [MIN_BLOCKS] * 4
    assert sorted(blocks_of_all) == [4, 4, 4, 4, 2 * 4], "a run beside the timed ones"
    assert few.num_timed == NUM_TIMED_LONG * len(blocks_of_few)
    assert replace(few, num_timed=0) == replace(every, num_timed=0), "with the same picture of all blocks"
    assert (few.strategy, few.at_once) == ("allgather_kv2", "guidance2")


def test_only_plain_blocks_of_long_steps_are_cut() -> None:
    whole = replace(models.model("wan"), additions={"style": {}}, additions_change=True)

    def timed(total_ms: float, strategy: str = "ulysses", **config: Any) -> DenoiserModel:
        cost = SimpleNamespace(total_ms=total_ms, spec=ParallelSpec.of(strategy, 2))
        plans: Any = {2: [SimpleNamespace(chosen=cost)]}
        return model_to_time(whole, models.branches("wan", "even"), plans, TorchChoices(**config))

    def num_blocks(model: DenoiserModel) -> int:
        return len(model.plan.blocks_of(model.modules["transformer"]))

    assert [num_blocks(timed(total_ms)) for total_ms in (900, 1100, 1e6)] == [3, 2, MIN_BLOCKS]
    assert not timed(900).switches
    assert timed(600) is whole
    assert timed(400) is whole
    assert timed(1e6, "tensor") is whole
    assert timed(1e6, fast=True) is whole
    assert timed(1e6, offloaded_blocks=1) is whole


class TrialError(RuntimeError):
    """Fails a trial."""


def after_a_failed_trial(folder: Path) -> tuple[bool, int]:
    """Return whether a failed trial of few blocks left the module unchanged, and the number of its blocks."""
    (branch,), model = models.branches("wan", "even"), models.model("wan")
    module = model.modules["transformer"]
    before = model.forward(module, branch.arguments)
    with patch.object(Autotuner, "_shortest_s", Mock(side_effect=TrialError)), pytest.raises(TrialError):
        of_few_blocks(folder, 1e-9)
    return torch.equal(model.forward(module, branch.arguments), before), len(module.blocks)  # type: ignore[arg-type]


def test_a_failed_trial_of_few_blocks_leaves_the_module_whole(tmp_path: Path) -> None:
    assert gang(2).run(after_a_failed_trial, tmp_path) == [(True, 4)] * 2


def test_exchanges_that_no_rule_can_shorten_much_are_not_timed() -> None:
    spec, others = ParallelSpec(ulysses=2), dict.fromkeys(("attention_ms", "elementwise_ms"), 0.0)
    others |= dict.fromkeys(("memory_bytes", "needed_bytes", "weight_bytes"), 0)

    def is_negligible(products_ms: float, exchange_ms: float) -> bool:
        cost = Cost(spec=spec, products_ms=products_ms, exchange_ms=exchange_ms, **others)  # type: ignore[arg-type]
        plan = SimpleNamespace(costs=(cost,), chosen=cost)
        return is_exchange_negligible(plan, spec)  # type: ignore[arg-type]

    assert is_negligible(5000.0, 60.0)
    assert not is_negligible(5000.0, 600.0)
    assert not is_negligible(50.0, 0.6), "a short step"


def test_a_strategy_that_is_named_is_not_timed(tmp_path: Path) -> None:
    assert gang(2).run(named, tmp_path) == ["ulysses2"] * 2
    assert not list(tmp_path.iterdir())


def named(folder: Path) -> str:
    context = RankContext(rank=dist.get_rank(), num_ranks=2, device="cpu")
    with closing(
        load_engine("torch", models.model("flux"), context, strategy="ulysses", choosing=choosing(folder))
    ) as engine:
        assert isinstance(engine, TorchEngine)
        return engine.division.team((0, 1)).spec.name


THREE = Times(strategies_ms={"ring3": 60.0, "allgather_kv3": 50.0, "ulysses3": 60.0, "guidance3": 20.0})


def test_as_many_branches_as_a_step_has_are_decided_on(tmp_path: Path) -> None:
    """A step has one, two (three ranks have no halves) or three branches at once; a later gang reads the file."""
    for first, again in gang(3).run(of_three_branches, tmp_path):
        assert (first.strategy, first.at_once) == ("allgather_kv3", "guidance3")
        assert (again.strategy, again.at_once, again.num_timed) == ("allgather_kv3", "guidance3", 0)
    (file,) = tmp_path.glob("tiny_*.json")
    assert json.loads(file.read_text())["strategies"]["3"] == ["allgather_kv3", "allgather_kv3", "guidance3"]


def of_three_branches(folder: Path) -> list[Started]:
    return [start(choosing(folder, num_branches=3), number, THREE) for number in (1, 2)]


# The file.


def after(folder: Path, change: Any, times: Times = MEASURED) -> tuple[dict[str, Any], Started]:
    """Return a gang's decision file, and a gang started after ``change`` in some fields or the whole text."""
    with ExitStack() as stack:
        if times.exchange:
            stack.enter_context(choice_of_exchange(fast=False))
        start(choosing(folder), 1, times)
        (file,) = folder.glob("tiny_*.json")
        written: dict[str, Any] = json.loads(file.read_text())
        dist.barrier()
        if dist.get_rank() == 0:
            file.write_text(change if isinstance(change, str) else json.dumps(changed(written, change)))
        dist.barrier()
        return written, start(choosing(folder), 2, times)


def changed(document: dict[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Return a decision with changed fields; None removes a field, and ``strategies`` are those of two ranks."""
    strategies = document["strategies"]
    fields = {**document, **change, "strategies": {**strategies, "2": change.get("strategies", strategies["2"])}}
    return {name: value for name, value in fields.items() if value is not None}


def test_a_decision_in_the_file_is_followed_whatever_would_be_faster(tmp_path: Path) -> None:
    (_, started), _ = gang(2).run(after, tmp_path, {"strategies": ["ulysses2"] * 2})
    assert (started.strategy, started.num_timed) == ("ulysses2", 0)


@pytest.mark.parametrize(
    "change",
    ["no JSON", '{"facts": {}}', "[]", {"strategies": ["ring2"]}],
    ids=["text", "facts", "list", "too few"],
)
def test_a_file_that_is_no_use_is_ignored_and_replaced(change: Any, tmp_path: Path) -> None:
    (written, started), _ = gang(2).run(after, tmp_path, change)
    assert started.strategy == "allgather_kv2"
    assert started.num_timed
    (file,) = tmp_path.glob("tiny_*.json")
    assert json.loads(file.read_text())["strategies"] == written["strategies"]


PARTS_ARE_FASTER = Times(strategies_ms=ULYSSES_MS, exchange={IN_PARTS: 0.8})


@pytest.mark.parametrize("exchange", [{"peer_memory": "no"}, {"parts_from_tokens": 1.5}, {"lanes": 2}, None])
def test_a_file_with_unknown_rules_or_without_is_no_use(exchange: Any, tmp_path: Path) -> None:
    (written, started), _ = gang(2).run(after, tmp_path, {"exchange": exchange}, PARTS_ARE_FASTER)
    assert written["exchange"] == {"peer_memory": True, "side_streams": True, "parts_from_tokens": 40}
    assert f"ulysses2 on 2, branches: 1, exchange {IN_PARTS}" in written["times_ms"]
    assert started.num_timed
    assert started.exchange == ExchangeRules(parts_from_tokens=40)


def test_two_gangs_that_start_at_once_decide_the_same(tmp_path: Path) -> None:
    assert gang(2).run(race, tmp_path) == ["allgather_kv2"] * 2


def race(folder: Path) -> str:
    """Let another gang write its decision while this one times steps that favour another strategy."""
    other = start(choosing(folder), 1, MEASURED).strategy
    asked = []

    def read_late(file: DecisionFile, sizes: tuple[int, ...]) -> Decision | None:
        asked.append(sizes)
        return None if len(asked) == 1 else read(file, sizes)

    read = DecisionFile.read
    with patch.object(DecisionFile, "read", read_late):
        mine = start(choosing(folder), 2, SWAPPED)
    assert mine.num_timed
    assert mine.strategy == other
    return other


# The exchange.


def decide(folder: Path, fast: bool, exchange: dict[str, float], options: TorchOptions | None = None) -> ExchangeRules:
    """Return a gang's decision when unusual rules multiply the usual time by the factors in ``exchange``."""
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
        (False, dict.fromkeys([IN_PARTS, NO_MEMORY, NO_STREAMS], 1.0), USUAL),
        (True, {NO_MEMORY: 0.8}, ExchangeRules(peer_memory=False)),
        (True, {NO_STREAMS: 0.8}, ExchangeRules(side_streams=False)),
        (True, {NO_MEMORY: 0.8, f"{NO_MEMORY}, {NO_STREAMS}": 0.9}, ExchangeRules(peer_memory=False)),
        (True, dict.fromkeys([IN_PARTS, NO_MEMORY, NO_STREAMS], 1.0), USUAL),
    ],
)
def test_rules_that_are_faster_by_more_than_noise_are_taken(
    fast: bool, exchange: dict[str, float], expected: ExchangeRules, tmp_path: Path
) -> None:
    assert gang(2).run(decide, tmp_path, fast, exchange) == [expected] * 2


def at_odds(folder: Path) -> ExchangeRules:
    """Let one rank gain what the other one loses."""
    return decide(folder, False, {IN_PARTS: 0.5 if dist.get_rank() else 1.5})


def test_ranks_whose_times_differ_decide_alike(tmp_path: Path) -> None:
    assert gang(2).run(at_odds, tmp_path) == [USUAL] * 2, "the slowest rank decides"


@pytest.mark.parametrize("peer_memory", [True, False])
def test_configured_rules_are_not_timed(peer_memory: bool, tmp_path: Path) -> None:
    options = TorchOptions(peer_memory=peer_memory)
    faster = {NO_MEMORY: 0.5} if peer_memory else {"as usual": 0.5}
    rules = gang(2).run(decide, tmp_path, True, faster, options)
    assert rules == [ExchangeRules(peer_memory=peer_memory)] * 2


def left_open_and_then_not(folder: Path) -> list[bool]:
    """Start gangs in turn: the first decides against peer memory, the second is configured to use it."""
    options = (None, TorchOptions(peer_memory=True), None)
    return [decide(folder, True, {NO_MEMORY: 0.8}, each).peer_memory for each in options]


def test_configured_rules_count_more_than_the_decision(tmp_path: Path) -> None:
    assert gang(2).run(left_open_and_then_not, tmp_path) == [[False, True, False]] * 2


def kernels_of(rules: ExchangeRules) -> list[int]:
    """Return the number of kernels in parts made after each step, by ``rules`` and then as usual."""
    made: list[int] = []

    def counted(*args: Any) -> Any:
        made.append(1)
        return ulysses_in_parts(*args)

    counts = []
    with (
        patch("engines.parallel.strategies.ulysses_in_parts", counted),
        closing(TorchEngine(models.model("flux"), strategy="ulysses")) as engine,
    ):
        for each in (rules, USUAL):
            engine.use(each)
            for length in NUM_TOKENS:
                engine.predict(models.branches("flux", length), EVERYONE)
                counts.append(len(made))
    return counts


def test_an_engine_with_its_weights_goes_over_to_other_rules() -> None:
    """The rules apply from their number of tokens on, and can be undone."""
    assert gang(2).run(kernels_of, ExchangeRules(parts_from_tokens=NUM_TOKENS["even"])) == [[1, 1, 1, 1]] * 2
    assert gang(2).run(kernels_of, ExchangeRules(parts_from_tokens=1)) == [[1, 2, 2, 2]] * 2


def divided(
    *, ulysses: int = 2, ring: int = 1, gather: int = 1, fast: bool = False, even: bool = True, num_tokens: int = 40
) -> DividedForward:
    team = team_of(ulysses=ulysses, ring=ring, allgather_kv=gather)
    return DividedForward(team=team, num_tokens=num_tokens, is_fast=fast, is_even=even)


def changes(each: DividedForward, rules: ExchangeRules = USUAL, peer_memory: bool = True) -> list[str | None]:
    """Return the change that each alternative in turn makes to ``rules``."""
    reaches = (lambda _: True) if peer_memory else None
    with patch.object(autotune, "from_all_ranks", lambda value: [value]):
        several = [alternative(name, rules, (each,), reaches) for name in EXCHANGE_FIELDS]
    return [None if rules is None else rules.describe() for rules in several]


def test_only_rules_that_would_change_the_step_are_timed() -> None:
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
    assert changes(divided(ulysses=1, gather=2)) == ["in parts from 40 tokens", None, None]
    assert changes(divided(ulysses=1, gather=2), peer_memory=False) == [None, None, None]
    assert changes(divided(ulysses=1, gather=2), replace(USUAL, peer_memory=False)) == [None, None, None]
    assert changes(divided(ulysses=1, gather=2, num_tokens=long)) == [None, NO_MEMORY, None]
    assert changes(divided(ulysses=2, gather=2, num_tokens=long))[1] is None
    assert changes(divided(ulysses=1, gather=2, num_tokens=long, fast=True))[1] is None


def test_a_cpu_has_no_choice() -> None:
    assert not overlaps(torch.device("cpu"))
