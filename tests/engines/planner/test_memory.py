"""Every rank refuses a step that cannot fit, with figures, and runs one that may fit."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from engines.core.layout import TokenLayout
from engines.core.model import Addition, LowRank
from engines.core.spec import ParallelSpec
from engines.planner import auto
from engines.planner.cost_model import USABLE, Workload
from engines.planner.forecast import forecast
from engines.planner.machine import H200
from engines.planner.profile import profile
from engines.planner.step_cost import MemoryFloor, StepCost
from engines.torch_engine.engine import TorchEngine
from tests.engines.support import models
from tests.engines.support.gloo import gang

GIB = 2**30


def test_the_figures_are_those_of_the_step() -> None:
    """24 GiB of weights leave 8 GiB of 32: 2**20 tokens of 8 KiB, with five copies alive."""
    floor = MemoryFloor(available_bytes=32 * GIB, weight_bytes=24 * GIB, token_bytes=8192)
    fits = 2**20 // 5
    floor.check(fits, ParallelSpec())
    floor.check(2 * fits, ParallelSpec(ulysses=2))
    floor.check(5 * fits, ParallelSpec(tensor=2))  # 12 GiB of weights, and half of the features
    with pytest.raises(ValueError, match=r"needs 40\.0 GiB .* 24\.0 of them for weights, and a rank has 32\.0 GiB"):
        floor.check(2 * fits, ParallelSpec())
    with pytest.raises(ValueError, match="a smaller size or fewer frames, or serve the model with more ranks"):
        floor.check(2 * fits, ParallelSpec(guidance=2))


def test_what_every_rank_holds_whole_is_not_divided() -> None:
    floor = MemoryFloor(available_bytes=32 * GIB, weight_bytes=24 * GIB, token_bytes=8192, hoisted_token_bytes=8192)
    assert floor.needed_bytes(2**20, ParallelSpec(ulysses=5)) == pytest.approx(40 * GIB, abs=2**20)


def test_no_step_takes_less_than_it_is_said_to() -> None:
    """The bound is what an eager block allocates at once, so a refusal is no guess."""
    hidden, num_tokens = 64, 512
    widen, narrow = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
    x_LD = torch.randn(num_tokens, hidden)
    wide = widen(x_LD)
    alive = x_LD.nbytes + wide.nbytes
    assert narrow(wide).shape == x_LD.shape
    floor = MemoryFloor(available_bytes=GIB, weight_bytes=0, token_bytes=4 * hidden)
    assert floor.needed_bytes(num_tokens, ParallelSpec()) <= alive


def refused(family: str) -> tuple[str, bool]:
    """Return the error of a gang whose second rank lacks memory, and whether a smaller step runs after it."""
    few = 2**20 if dist.get_rank() == 0 else 2**18
    model = models.model(family)
    weights = sum(weight.nbytes for module in model.modules.values() for weight in module.parameters())
    small, large = models.branches(family, "even"), models.branches(family, "uneven")
    tokens = [sum(model.stream_lengths(branch.arguments).values()) for (branch,) in (small, large)]
    row = model.num_heads * model.head_dim * 4
    between = weights + 5 * row * (min(tokens) + max(tokens)) // 4
    available = between if dist.get_rank() else 10 * between + few
    with (
        patch("engines.planner.measure.memory_bytes", lambda _: available),
        closing(TorchEngine(model, strategy="ulysses")) as engine,
    ):
        smaller, larger = (small, large) if tokens[0] < tokens[1] else (large, small)
        text = ""
        try:
            engine.predict(larger, (0, 1))
        except ValueError as error:
            text = str(error)
        return text, bool(engine.predict(smaller, (0, 1))[0].isfinite().all())


def test_all_ranks_refuse_a_step_together_and_go_on() -> None:
    (text, goes_on), other = gang(2).run(refused, "wan")
    assert (text, goes_on) == other
    assert "GiB on each rank at least" in text
    assert goes_on


def tensors() -> dict[int, Tensor]:
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from other objects whose class is read
        return {id(x): x for x in gc.get_objects() if isinstance(x, Tensor)}


def held_bytes(precision: str, *, fast: bool, additions: Mapping[str, Addition] = MappingProxyType({})) -> int:
    """Return the bytes of all live storages of a model and an engine after a step, with all ``additions``."""
    before = tensors()
    model = replace(models.model.__wrapped__("flux"), additions=additions)
    mix = tuple((name, 1.0) for name in additions)
    with closing(TorchEngine(model, precision=precision, fast=fast)) as engine:
        engine.predict(tuple(replace(one, additions=mix) for one in models.branches("flux", "even")), (0,))
        engine.release_steps()
        made = (x.untyped_storage() for key, x in tensors().items() if key not in before)
        return sum({storage.data_ptr(): storage.nbytes() for storage in made}.values())


@pytest.mark.parametrize(
    ("precision", "fast"), [("native", False), ("int8", False), ("fp8", False), ("native", True), ("fp8", True)]
)
def test_weights_take_what_an_engine_holds(precision: str, fast: bool) -> None:
    """Quantised layers replace the loaded ones, in a module and in a hand-ordered step."""
    counted = profile(models.model("flux"))
    layout = TokenLayout(lengths=(("text", 16), ("image", 24)), num_chunks=1)
    step = StepCost(counted, layout, ParallelSpec(), replace(H200, fast_path=fast), precision)
    assert step.weight_bytes() == pytest.approx(held_bytes(precision, fast=fast), rel=0.01)
    assert step.weight_bytes() <= step.loading_bytes() <= counted.weight_bytes


@pytest.mark.parametrize(("precision", "fast"), [("native", False), ("native", True), ("int8", False), ("fp8", True)])
def test_loaded_values_of_weights_that_additions_change_count(precision: str, fast: bool) -> None:
    weights = dict(models.model("flux").modules["transformer"].named_parameters())
    changed = [name for name, weight in weights.items() if name.startswith("transformer_blocks") and weight.ndim == 2]
    low_ranks = {
        name: LowRank(up_NR=torch.ones(len(weights[name]), 1), down_RK=torch.ones(1, weights[name].shape[1]))
        for name in changed
    }
    additions: dict[str, Addition] = {"one": {"transformer": low_ranks}}
    num_bytes = sum(low_rank.up_NR.nbytes + low_rank.down_RK.nbytes for low_rank in low_ranks.values())
    layout = TokenLayout(lengths=(("text", 16), ("image", 24)), num_chunks=1)
    counted = profile(replace(models.model("flux"), additions=additions))
    step = StepCost(counted, layout, ParallelSpec(), replace(H200, fast_path=fast), precision)
    assert counted.changed_weight_bytes > 0.2 * counted.weight_bytes
    held = held_bytes(precision, fast=fast, additions=additions)
    assert step.weight_bytes() == pytest.approx(held, abs=num_bytes + 0.01 * held)


@pytest.mark.parametrize(
    ("num_bytes", "num_hoisted", "copies"),
    [
        (2**31, 2, 4 + 1),
        (2**31, 1, 2 + 1),
        (2**32, 1, 2),
        (2**32, 2, 2),
        (2**33, 1, 1),
        (2**33, 2, 2),
    ],
)
def test_what_jobs_compute_once_counts_for_two_jobs_and_for_a_captured_step(
    num_bytes: int, num_hoisted: int, copies: int
) -> None:
    """It counts once if two take more than the cache holds; captured steps read no inputs above 2 GiB."""
    counted = profile(models.model("flux"))
    layout = TokenLayout(lengths=(("text", 128), ("image", 256)), num_chunks=1)
    step = StepCost(counted, layout, ParallelSpec(), H200, "native")
    features = {"image": num_bytes // 256 // counted.element_bytes}
    whole = replace(step, profile=replace(counted, hoisted_features=features, num_hoisted=num_hoisted))
    assert whole.memory_bytes() - step.memory_bytes() == copies * num_bytes


@pytest.mark.parametrize(
    ("spec", "offloaded_blocks", "copies"),
    [(ParallelSpec(), 0, 5), (ParallelSpec(tensor=2), 0, 0), (ParallelSpec(), 1, 0)],
    ids=["whole weights", "divided weights", "offloaded blocks"],
)
def test_keys_of_two_jobs_prompts_are_kept_and_those_of_one_read_by_a_graph(
    spec: ParallelSpec, offloaded_blocks: int, copies: int
) -> None:
    counted = profile(models.model("flux"))
    layout = TokenLayout(lengths=(("image", 256),), num_chunks=1)
    step = StepCost(counted, layout, spec, H200, "native", offloaded_blocks)
    keyed = replace(step, profile=replace(counted, hoisted_numbers=2**20))
    assert keyed.memory_bytes() - step.memory_bytes() == copies * 2**20 * counted.element_bytes


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_a_second_job_computes_once_rules_no_division_out(num_ranks: int) -> None:
    """It is computed again at each step if there is no room. The values of one job must fit."""
    counted = replace(profile(models.model("flux")), hoisted_numbers=2**26)
    work = Workload(lengths=(("text", 128), ("image", 256)), num_branches=2)
    roomy = forecast(counted, work, num_ranks, H200).chosen
    needed = roomy.memory_bytes - 2 * 2**26 * counted.element_bytes
    tight, tighter = (replace(H200, memory_bytes=int(size / USABLE)) for size in (needed + 2, needed - 2**23))
    assert forecast(counted, work, num_ranks, tight).chosen == roomy
    same = None if num_ranks == 1 else roomy.spec
    with pytest.raises(ValueError, match="no way to divide the step fits"):
        forecast(counted, work, num_ranks, tighter, same_weights=same)


def test_quantised_weights_need_no_room_for_those_that_are_read() -> None:
    counted = profile(models.model("flux"))
    layout = TokenLayout(lengths=(("text", 1), ("image", 1)), num_chunks=1)
    for fast in (True, False):
        machine = replace(H200, fast_path=fast)
        fp8, native = (StepCost(counted, layout, ParallelSpec(), machine, one) for one in ("fp8", "native"))
        assert fp8.weight_bytes() < 0.6 * native.weight_bytes()
        assert fp8.memory_bytes() < 0.75 * native.memory_bytes()
    changed = replace(counted, changed_weight_bytes=10**6)
    assert replace(fp8, profile=changed).weight_bytes() == fp8.weight_bytes() + 10**6


@pytest.mark.parametrize(("on_host", "divides_weights"), [(False, True), (True, False)])
def test_auto_divides_no_weights_for_loaded_values_in_host_memory(on_host: bool, divides_weights: bool) -> None:
    model = models.model("flux")
    whole = profile(model)
    counted = replace(whole, changed_weight_bytes=100 * whole.weight_bytes)
    machine = replace(H200, memory_bytes=50 * whole.weight_bytes)
    ranks: dict[str, Any] = {"rank": 1, "num_ranks": 2, "groups": Mock(), "device": torch.device("cpu")}
    one_rank = {"profile": Mock(return_value=counted), "measure": Mock(return_value=machine), "Teams": Mock()}
    with patch.multiple(auto, **one_rank), patch.object(auto, "forecast", partial(forecast, must_fit=False)):
        specs = auto.choose_specs(model, precision="native", originals_on_host=on_host, **ranks)
    assert all(spec.divides_weights is divides_weights for spec in specs.of(2))
