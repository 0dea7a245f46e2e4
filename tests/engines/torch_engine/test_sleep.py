"""Engines give the same bits after their weights slept, on teams, quantised, and with additions."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from engines.core.model import Addition, Arguments, Branch, DenoiserModel, LowRank, ModelInputs
from engines.core.weight_memory import WeightMemory
from engines.torch_engine.engine import TorchEngine
from tests.engines.support import models
from tests.engines.support.gloo import gang
from tests.engines.support.rank_resources import separate_rank_resources

ADDED = "transformer_blocks.0.attn.to_q.weight"


@pytest.mark.parametrize(
    ("strategy", "precision"), [("ulysses", "native"), ("tensor", "native"), ("tensor", "int8"), ("ulysses", "fp8")]
)
def test_a_step_after_sleep_has_the_same_bits(strategy: str, precision: str, tmp_path: Path) -> None:
    for share, num_copies in gang(2).run(sleep_between_steps, strategy, precision, tmp_path):
        assert share > 0.95, "almost all memory of the weights was away"
        assert num_copies == 1


def sleep_between_steps(strategy: str, precision: str, folder: Path) -> tuple[float, int]:
    """Return the share of the weights that left the device, and the number of copies made."""
    with (
        memory_of_a_model(folder) as (memory, model),
        closing(TorchEngine(model, strategy=strategy, precision=precision)) as engine,
    ):
        branches, everyone = models.branches("flux", "uneven"), tuple(range(dist.get_world_size()))
        (before,) = engine.predict(branches, everyone)
        for _ in range(2):
            memory.sleep()
            dist.barrier()
            memory.wake()
            (after,) = engine.predict(branches, everyone)
            assert torch.equal(before, after)
        weights = engine._sharded.module("transformer", engine.division.team(everyone)).state_dict().values()
        memory.sleep()
        lost = sum(x.numel() * x.element_size() for x in weights if not x.untyped_storage().nbytes())
        return lost / sum(x.numel() * x.element_size() for x in weights), memory.num_copies


def test_additions_are_applied_again(tmp_path: Path) -> None:
    """The copy has the loaded weights: weights with an addition are not copied."""
    low_rank = LowRank(up_NR=torch.ones(128, 1), down_RK=torch.ones(1, 128), scale=0.1)
    additions: dict[str, Addition] = {"one": {"transformer": {ADDED: low_rank}}}
    with memory_of_a_model(tmp_path, additions) as (memory, model):
        with closing(TorchEngine(model)) as engine:
            plain = models.branches("flux", "even")
            added = tuple(replace(branch, additions=(("one", 1.0),)) for branch in plain)

            def both() -> tuple[Tensor, Tensor]:
                return first(engine, plain), first(engine, added)

            before = both()
            assert not torch.equal(*before)
            for _ in range(2):  # asleep while the addition is in the weights
                memory.sleep()
                memory.wake()
                assert all(map(torch.equal, both(), before))
            assert memory.num_copies == 1
        assert not memory._undo, "a closed engine changes nothing any more"


def test_an_addition_that_comes_after_a_sleep_sleeps_too(tmp_path: Path) -> None:
    low_rank = LowRank(up_NR=torch.ones(128, 1), down_RK=torch.ones(1, 128), scale=0.1)
    table: dict[str, Addition] = {}
    with (
        memory_of_a_model(tmp_path, table) as (memory, model),
        closing(TorchEngine(replace(model, additions_change=True))) as engine,
    ):
        plain = models.branches("flux", "even")
        before = first(engine, plain)
        memory.sleep()
        table["one"] = {"transformer": {ADDED: low_rank}}
        memory.wake()
        mixed = tuple(replace(branch, additions=(("one", 1.0),)) for branch in plain)
        added = first(engine, mixed)
        assert not torch.equal(added, before)
        for _ in range(2):  # asleep while the addition is in the weights
            memory.sleep()
            memory.wake()
            assert torch.equal(first(engine, plain), before)
            assert torch.equal(first(engine, mixed), added)


def test_what_jobs_computed_once_leaves_the_device_too(tmp_path: Path) -> None:
    """A driving clip's keys and values may take more memory than the weights."""
    made: list[weakref.ref[Tensor]] = []
    with memory_of_a_model(tmp_path, family="wan") as (memory, model):
        hoisted = model.hoisted
        assert hoisted is not None

        def hoist(module: nn.Module, inputs: Arguments) -> ModelInputs:
            result = hoisted(module, inputs)
            made.extend(map(weakref.ref, result.values()))
            return result

        with closing(TorchEngine(replace(model, hoisted=hoist))) as engine:
            branches = models.branches("wan", "even")
            before, num_made = first(engine, branches), len(made)
            assert num_made
            assert all(one() is not None for one in made)
            memory.sleep()
            gc.collect()
            assert all(one() is None for one in made)
            memory.wake()
            assert torch.equal(first(engine, branches), before)
            assert len(made) == 2 * num_made
        assert not memory._undo


def first(engine: TorchEngine, branches: tuple[Branch, ...]) -> Tensor:
    return engine.predict(branches, (0,))[0]


@contextmanager
def memory_of_a_model(
    folder: Path, additions: Mapping[str, Addition] | None = None, family: str = "flux"
) -> Iterator[tuple[WeightMemory, DenoiserModel]]:
    with separate_rank_resources() as resources:
        memory = resources.get(WeightMemory)
        memory.open("cpu", folder)
        with memory.region():
            model = models.model.__wrapped__(family)  # its storages are freed
        memory.hold(model.modules["transformer"])
        yield memory, replace(model, additions={} if additions is None else additions)
