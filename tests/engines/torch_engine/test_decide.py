"""What "auto" means is decided once, by steps that are timed, and stays so however often a gang is started."""

from __future__ import annotations

import hashlib
import json
import random
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist

from engines.core.engine import Choosing
from engines.core.rank import RankContext
from engines.planner.kept import KeptDecision
from engines.planner.machine import Machine
from engines.registry import load_engine
from engines.torch_engine.engine import TorchEngine
from tests.engines.planner.test_cost_model import machine
from tests.engines.support import models
from tests.engines.support.gloo import gang

JITTER = 0.03
MEASURED_MS = {"ring2": 71.4, "allgather_kv2": 61.6, "ulysses2": 61.6}
"""What a step is said to take here, however the tiny model's really go."""
NUM_STARTS = 10


def jittered(seed: int) -> Machine:
    """A machine on which ring and all-gather cost the same, give or take what a measurement does."""
    noise, whole = random.Random(seed), machine()
    lines = {
        kind: replace(line, latency_s=line.latency_s * noise.uniform(1 - JITTER, 1 + JITTER))
        for kind, line in whole.exchanges.items()
    }
    return replace(whole, exchanges=lines)


def choosing(folder: Path, **fields: object) -> Choosing:
    named = {"folder": folder, "name": "tiny", "facts": {"model": "tiny"}, **fields}
    return Choosing(typical_step=lambda: models.branches("flux", "even", num=1), **named)  # type: ignore[arg-type]


def start(how: Choosing, seed: int, times_ms: dict[str, float]) -> tuple[str, str, int]:
    """How a gang that starts now divides a step, a digest of what it predicts, and how many steps it timed."""
    rank, num_timed = dist.get_rank(), 0
    noise = random.Random(100 * seed + rank)

    def timed_s(engine: TorchEngine, branches: tuple[object, ...], ranks: tuple[int, ...]) -> float:
        nonlocal num_timed
        num_timed += 1
        usual_ms = times_ms[engine.division.team(ranks, len(branches)).spec.name]
        return usual_ms / 1e3 * noise.uniform(1 - JITTER, 1 + JITTER)

    context = RankContext(rank=rank, num_ranks=2, device="cpu")
    with ExitStack() as stack:
        stack.enter_context(patch("engines.planner.auto.measure", lambda *_: jittered(seed)))
        stack.enter_context(patch("engines.torch_engine.decide._timed_s", timed_s))
        engine = stack.enter_context(closing(load_engine("torch", models.model("flux"), context, choosing=how)))
        assert isinstance(engine, TorchEngine)
        (predicted,) = engine.predict(models.branches("flux", "uneven"), (0, 1))
        picture = hashlib.sha256(predicted.numpy().tobytes()).hexdigest()
        return engine.division.team((0, 1)).spec.name, picture, num_timed


def starts(folder: Path, folders: int) -> list[tuple[str, str, int]]:
    """Of gangs one after the other, of which so many have a folder of their own; each time another way is faster."""
    swapped = {**MEASURED_MS, "ring2": 50.0}
    return [
        start(choosing(folder / str(number % folders)), number, swapped if number % 2 else MEASURED_MS)
        for number in range(NUM_STARTS)
    ]


def test_a_gang_that_is_rebuilt_ten_times_decides_once_and_makes_one_picture(tmp_path: Path) -> None:
    mine, others = gang(2).run(starts, tmp_path, 1)
    assert mine == others
    assert {(name, picture) for name, picture, _ in mine} == {mine[0][:2]}
    assert mine[0][0] == "allgather_kv2", "as it was timed, and not as predicted"
    assert mine[0][2] > 0
    assert [num_timed for *_, num_timed in mine[1:]] == [0] * (NUM_STARTS - 1)


def test_without_what_was_kept_it_would_not(tmp_path: Path) -> None:
    mine, _ = gang(2).run(starts, tmp_path, NUM_STARTS)
    assert {name for name, *_ in mine} == {"ring2", "allgather_kv2"}
    assert len({picture for _, picture, _ in mine}) == 2, "two ways give two pictures: the bytes would have changed"


def equals(folder: Path) -> list[str]:
    """Starts without anything kept, where the ways take the same time."""
    times_ms = dict.fromkeys(MEASURED_MS, 60.19)
    return [start(choosing(folder / str(number)), number, times_ms)[0] for number in range(3)]


def test_ties_within_the_noise_are_broken_by_name(tmp_path: Path) -> None:
    assert gang(2).run(equals, tmp_path) == [["allgather_kv2"] * 3] * 2


def after(folder: Path, text: str) -> str:
    """A start where a file of that text is in the place of the decision."""
    how = choosing(folder)
    name, *_ = start(how, 1, MEASURED_MS)
    (file,) = folder.glob("tiny_*.json")
    dist.barrier()
    if dist.get_rank() == 0:
        kept = json.loads(file.read_text())
        file.write_text(text or json.dumps(kept | {"strategies": {**kept["strategies"], "2": ["ulysses2"] * 2}}))
    dist.barrier()
    again, _, num_timed = start(how, 2, MEASURED_MS)
    return f"{name}, {again}, {'timed' if num_timed else 'kept'}"


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
    other = start(choosing(folder), 1, MEASURED_MS)[0]
    asked = []

    def find_late(decision: object, sizes: tuple[int, ...]) -> object:
        asked.append(sizes)
        return None if len(asked) == 1 else find(decision, sizes)

    find = KeptDecision.find
    with patch("engines.planner.kept.KeptDecision.find", find_late):
        mine, _, num_timed = start(choosing(folder), 2, {**MEASURED_MS, "ring2": 50.0})
    assert num_timed
    assert mine == other
    return mine


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
