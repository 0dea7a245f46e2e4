"""What "auto" means is decided once, by steps that are timed, and stays so however often a gang is started."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist

from engines.core.rank import RankContext
from engines.planner.kept import KeptDecision
from engines.registry import load_engine
from engines.torch_engine.engine import TorchEngine
from tests.engines.support import models
from tests.engines.support.gloo import gang
from tests.engines.torch_engine.support.decisions import Started, Times, choosing, start

STRATEGIES_MS = {"ring2": 71.4, "allgather_kv2": 61.6, "ulysses2": 61.6}
MEASURED = Times(strategies_ms=STRATEGIES_MS)
SWAPPED = Times(strategies_ms={**STRATEGIES_MS, "ring2": 50.0})
NUM_STARTS, NUM_TOKENS = 10, 100


def starts(folder: Path, folders: int) -> list[Started]:
    """Of gangs one after the other, of which so many have a folder of their own; each time another way is faster."""
    return [
        start(choosing(folder / str(number % folders)), number, SWAPPED if number % 2 else MEASURED)
        for number in range(NUM_STARTS)
    ]


def test_a_gang_that_is_rebuilt_ten_times_decides_once_and_makes_one_picture(tmp_path: Path) -> None:
    mine, others = gang(2).run(starts, tmp_path, 1)
    assert mine == others
    assert all(replace(each, num_timed=0) == replace(mine[0], num_timed=0) for each in mine)
    assert mine[0].strategy == "allgather_kv2", "as it was timed, and not as predicted"
    assert mine[0].num_timed > 0
    assert [each.num_timed for each in mine[1:]] == [0] * (NUM_STARTS - 1)
    assert mine[0].estimates is not None, "kept with it, as it was"
    assert sorted(mine[0].estimates.step_s(NUM_TOKENS, 1)) == [1, 2]


def test_without_what_was_kept_it_would_not(tmp_path: Path) -> None:
    mine, _ = gang(2).run(starts, tmp_path, NUM_STARTS)
    assert {each.strategy for each in mine} == {"ring2", "allgather_kv2"}
    assert len({each.picture for each in mine}) == 2, "two ways give two pictures: the bytes would have changed"


def equals(folder: Path) -> list[str]:
    """Starts without anything kept, where the ways take the same time."""
    times = Times(strategies_ms=dict.fromkeys(STRATEGIES_MS, 60.19))
    return [start(choosing(folder / str(number)), number, times).strategy for number in range(3)]


def test_ties_within_the_noise_are_broken_by_name(tmp_path: Path) -> None:
    assert gang(2).run(equals, tmp_path) == [["allgather_kv2"] * 3] * 2


def after(folder: Path, text: str) -> str:
    """A start where a file of that text is in the place of the decision."""
    how = choosing(folder)
    first = start(how, 1, MEASURED)
    (file,) = folder.glob("tiny_*.json")
    dist.barrier()
    if dist.get_rank() == 0:
        kept = json.loads(file.read_text())
        file.write_text(text or json.dumps(kept | {"strategies": {**kept["strategies"], "2": ["ulysses2"] * 2}}))
    dist.barrier()
    again = start(how, 2, MEASURED)
    return f"{first.strategy}, {again.strategy}, {'timed' if again.num_timed else 'kept'}"


def test_a_file_that_is_no_use_is_ignored(tmp_path: Path) -> None:
    """And one that is, is followed, whatever would be faster."""
    ranks = gang(2)
    assert ranks.run(after, tmp_path / "a", "")[0] == "allgather_kv2, ulysses2, kept"
    for number, text in enumerate(("no JSON", '{"facts": {}}', "[]")):
        assert ranks.run(after, tmp_path / str(number), text)[0] == "allgather_kv2, allgather_kv2, timed"


def test_two_gangs_that_start_at_once_decide_the_same(tmp_path: Path) -> None:
    assert gang(2).run(race, tmp_path) == ["allgather_kv2"] * 2


def race(folder: Path) -> str:
    """Another gang keeps its decision while this one times steps that say otherwise."""
    other = start(choosing(folder), 1, MEASURED).strategy
    asked = []

    def find_late(decision: object, sizes: tuple[int, ...]) -> object:
        asked.append(sizes)
        return None if len(asked) == 1 else find(decision, sizes)

    find = KeptDecision.find
    with patch("engines.planner.kept.KeptDecision.find", find_late):
        mine = start(choosing(folder), 2, SWAPPED)
    assert mine.num_timed
    assert mine.strategy == other
    return other


THREE = Times(strategies_ms={"ring3": 60.0, "allgather_kv3": 50.0, "ulysses3": 60.0, "guidance3": 20.0})


def test_as_many_branches_as_a_step_has_are_decided_on(tmp_path: Path) -> None:
    """One alone, two (no team of three ranks has halves), and three at once; and kept so."""
    for first, again in gang(3).run(of_three_branches, tmp_path):
        assert (first.strategy, first.at_once) == ("allgather_kv3", "guidance3")
        assert (again.strategy, again.at_once, again.num_timed) == ("allgather_kv3", "guidance3", 0)
    (file,) = tmp_path.glob("tiny_*.json")
    assert json.loads(file.read_text())["strategies"]["3"] == ["allgather_kv3", "allgather_kv3", "guidance3"]


def of_three_branches(folder: Path) -> list[Started]:
    return [start(choosing(folder, num_branches=3), number, THREE) for number in (1, 2)]


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
