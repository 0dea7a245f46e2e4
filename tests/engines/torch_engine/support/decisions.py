"""Gangs of two Gloo ranks that decide "auto" by step times that a test sets, with measurement noise."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist

from engines.core.engine import Choosing, RankContext
from engines.core.estimates import StepEstimates
from engines.planner.machine import Machine
from engines.registry import load_engine
from engines.torch_engine.engine import TorchEngine
from engines.torch_engine.exchange.choose import ExchangeRules
from engines.torch_engine.options import TorchOptions
from tests.engines.planner.test_cost_model import machine
from tests.engines.support import models

JITTER = 0.03
STRATEGIES_MS = {"ring2": 71.4, "allgather_kv2": 61.6, "ulysses2": 61.6}
EVERYONE = (0, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Simulated step times, whatever the tiny model takes: by strategy, times a factor for an unusual exchange."""

    strategies_ms: Mapping[str, float]
    exchange: Mapping[str, float] = field(default_factory=dict)

    def of(self, engine: TorchEngine, branches: tuple[object, ...], ranks: tuple[int, ...]) -> float:
        usual_ms = self.strategies_ms[engine.division.team(ranks, len(branches)).spec.name]
        return usual_ms / 1e3 * self.exchange.get(engine.config.exchange.describe(), 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """A gang's decision: strategies for one branch and for as many as may run at once, and its exchange rules. Then a
    digest of its prediction, the number of timed steps, and its estimates."""

    strategy: str
    at_once: str
    exchange: ExchangeRules
    picture: str
    num_timed: int
    estimates: StepEstimates | None = None


def jittered(seed: int) -> Machine:
    """Return a machine on which ring and all-gather cost the same, within measurement noise."""
    noise, whole = random.Random(seed), machine()
    lines = {
        kind: replace(line, latency_s=line.latency_s * noise.uniform(1 - JITTER, 1 + JITTER))
        for kind, line in whole.exchanges.items()
    }
    return replace(whole, exchanges=lines)


def choosing(folder: Path, num_branches: int = 1, family: str = "flux", **fields: object) -> Choosing:
    named = {"folder": folder, "name": "tiny", "facts": {"model": "tiny"}, **fields}
    step = partial(models.branches, family, "even", num=num_branches)
    return Choosing(typical_step=step, **named)  # type: ignore[arg-type]


def start(how: Choosing, seed: int, times: Times, options: TorchOptions | None = None, family: str = "flux") -> Started:
    """Start a gang. Return what it decided."""
    num_timed = 0
    noise = random.Random(100 * seed + dist.get_rank())

    def timed_s(engine: TorchEngine, branches: tuple[object, ...], ranks: tuple[int, ...]) -> float:
        nonlocal num_timed
        num_timed += 1
        return times.of(engine, branches, ranks) * noise.uniform(1 - JITTER, 1 + JITTER)

    everyone = tuple(range(dist.get_world_size()))
    context = RankContext(rank=dist.get_rank(), num_ranks=len(everyone), device="cpu")
    with (
        patch("engines.planner.auto.measure", lambda *_: jittered(seed)),
        patch("engines.torch_engine.autotune._timed_s", timed_s),
        closing(load_engine("torch", models.model(family), context, options=options, choosing=how)) as engine,
    ):
        assert isinstance(engine, TorchEngine)
        (predicted,) = engine.predict(models.branches(family, "uneven"), everyone)
        picture = hashlib.sha256(predicted.numpy().tobytes()).hexdigest()
        one, *_, most = engine.division.specs.of(len(everyone))
        names = {"strategy": one.name, "at_once": most.name, "picture": picture}
        found = {"exchange": engine.config.exchange, "num_timed": num_timed, "estimates": engine.estimates}
        return Started(**names, **found)  # type: ignore[arg-type]


@contextmanager
def choice_of_exchange(*, fast: bool) -> Iterator[None]:
    """Let ranks choose how they exchange heads, as on GPUs, in hand-ordered steps or a module's. Exchanging heads is by
    far the cheapest."""
    with ExitStack() as stack:
        stack.enter_context(patch(f"{__name__}.machine", partial(machine, all_to_all=0.1)))
        where = "engines.torch_engine.autotune"
        stack.enter_context(patch(f"{where}.overlaps", lambda device: True))
        stack.enter_context(patch(f"{where}.reachable", lambda axis, device, dtype: True))
        stack.enter_context(patch("engines.torch_engine.autotune.TorchEngine", partial(TorchEngine, fast=fast)))
        yield
