"""Steps are captured at the right time and count as warm, with fakes for CUDA's graphs."""

from __future__ import annotations

import gc
import logging
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor, nn

from engines.core.model import LATENTS, MAX_CAPTURED_BYTES, Arguments, Branch, StepTensors
from engines.core.spec import ParallelSpec
from engines.core.tensors import relative_difference
from engines.parallel.mesh import Team, team_of_one
from engines.parallel.sharded import ShardedModel
from engines.planner.profile import rough_flops
from engines.torch_engine import steps
from engines.torch_engine.config import TorchChoices
from engines.torch_engine.steps import StepRunner
from tests.engines.support import models

ALONE = team_of_one()
HALF = replace(ALONE, spec=ParallelSpec(guidance=2))
CAPTURING = TorchChoices(capture=True)


class Recording:
    """Stands for a ``CapturedStep``: replays by running again, into the memory of the last result."""

    def __init__(self, function: Callable[[StepTensors], Tensor], example: StepTensors, pool: object) -> None:
        self._function, self._result = function, function(example)

    def __call__(self, tensors: StepTensors) -> Tensor:
        return self._result.copy_(self._function(tensors))

    def close(self) -> None:
        pass


@pytest.fixture
def runner() -> Iterator[StepRunner]:
    model = models.model("flux")
    sharded = ShardedModel(model)
    with patch.object(steps, "GraphPool"), patch.object(steps, "CapturedStep", Recording):
        yield StepRunner(model, sharded, config=CAPTURING, device=torch.device("cpu"))
    sharded.close()


@pytest.mark.parametrize(("made", "num_captured"), [({"made": torch.ones(1)}, 1), ({}, 0)])
def test_a_step_that_reads_values_is_captured_if_it_is_given_what_is_made_before(
    made: StepTensors, num_captured: int, caplog: pytest.LogCaptureFixture
) -> None:
    plain, captured = models.model("flux"), list[Recording]()

    def forward(module: nn.Module, arguments: Arguments) -> Tensor:
        return plain.forward(module, {name: value for name, value in arguments.items() if name not in made})

    def capture(*args: Any) -> Recording:
        captured.append(Recording(*args))
        return captured[-1]

    model = replace(plain, reads_values=True, hoisted=lambda module, arguments: made, forward=forward)
    sharded = ShardedModel(model)
    with patch.object(steps, "GraphPool"), patch.object(steps, "CapturedStep", capture):
        runner = StepRunner(model, sharded, config=CAPTURING, device=torch.device("cpu"))
        warm = [found_warm(runner, shape(0)) for _ in range(4)]
    sharded.close()
    assert len(captured) == num_captured
    assert warm == ([False, False, True, True] if made else [False, True, True, True])
    assert caplog.text.count("a step is not captured") == 1 - num_captured


def test_a_step_of_large_inputs_is_not_captured(caplog: pytest.LogCaptureFixture) -> None:
    """Its graph would read a copy of them, and hold one for each size."""
    plain = models.model("flux")

    def forward(module: nn.Module, arguments: Arguments) -> Tensor:
        return plain.forward(module, {name: value for name, value in arguments.items() if name != "made"})

    large = torch.empty(MAX_CAPTURED_BYTES + 1, dtype=torch.uint8, device="meta")
    model = replace(plain, hoisted=lambda module, arguments: {"made": large}, forward=forward)
    sharded, capture = ShardedModel(model), Mock()
    with patch.object(steps, "GraphPool"), patch.object(steps, "CapturedStep", capture):
        runner = StepRunner(model, sharded, config=CAPTURING, device=torch.device("cpu"))
        assert [found_warm(runner, shape(0)) for _ in range(3)] == [False, True, True]
    sharded.close()
    assert not capture.called
    assert caplog.text.count("a step is not captured: its inputs take 2.0 GiB") == 1


LONG = "a step is not captured: it takes seconds"


@pytest.mark.parametrize("is_long", [True, False])
@pytest.mark.parametrize("parts", [{"ulysses": 3}, {"ring": 2, "tensor": 2}, {"guidance": 2}, {}])
def test_long_steps_are_not_captured(
    parts: dict[str, int], is_long: bool, runner: StepRunner, caplog: pytest.LogCaptureFixture
) -> None:
    """The ranks of a branch divide its arithmetic."""
    team, num_ranks = replace(ALONE, spec=ParallelSpec(**parts)), math.prod(parts.values()) // parts.get("guidance", 1)
    limit = rough_flops(runner._model, shape(0)) / num_ranks + (-1 if is_long else 1)
    with (
        patch.object(steps, "MAX_CAPTURED_FLOPS", limit),
        patch.object(ShardedModel, "forward", lambda *_: torch.ones(1)),
        caplog.at_level(logging.INFO, steps.__name__),
    ):
        warm = [found_warm(runner, shape(0), team) for _ in range(4)]
    assert warm == ([False, True, True, True] if is_long else [False, False, True, True])
    assert runner.num_captured == (0 if is_long else 1)
    assert caplog.text.count(LONG) == is_long


def test_long_hand_ordered_steps_are_captured() -> None:
    model = models.model.__wrapped__("flux")
    sharded = ShardedModel(model)
    with (
        patch.object(steps, "MAX_CAPTURED_FLOPS", 0.0),
        patch.object(steps, "GraphPool"),
        patch.object(steps, "CapturedStep", Recording),
    ):
        runner = StepRunner(model, sharded, config=replace(CAPTURING, fast=True), device=torch.device("cpu"))
        assert runner.allows_capture(shape(0), ALONE)
        assert [found_warm(runner, shape(0)) for _ in range(3)] == [False, False, True]
    sharded.close()


@torch.no_grad()
def found_warm(runner: StepRunner, branch: Branch, team: Team = ALONE) -> bool:
    runner.run(branch, team)
    return runner.was_warm


def shape(number: int) -> Branch:
    return models.branches("flux", "even", num=number + 1)[number]


def test_a_step_that_captures_is_not_warm(runner: StepRunner) -> None:
    assert [found_warm(runner, shape(0)) for _ in range(4)] == [False, False, True, True]


def test_each_precision_of_attention_has_a_graph_of_its_own(runner: StepRunner) -> None:
    plain, named = shape(0), replace(shape(0), attention="fp8")
    assert [found_warm(runner, plain) for _ in range(3)] == [False, False, True]
    assert [found_warm(runner, named) for _ in range(3)] == [False, False, True]
    replayed, in_float8 = (runner.run(branch, ALONE) for branch in (plain, named))
    assert runner.was_warm
    assert 0.005 < relative_difference(in_float8, replayed) < 0.1


def test_a_step_does_not_hold_the_inputs_of_the_first_job_with_its_shape(runner: StepRunner) -> None:
    branch = shape(0)
    branch = replace(branch, inputs={name: x.clone() for name, x in branch.inputs.items()})
    inputs = [weakref.ref(x) for x in branch.inputs.values()]
    for _ in range(3):
        runner.run(branch, ALONE)
    del branch
    gc.collect()
    assert [x() for x in inputs] == [None] * len(inputs)


def test_steps_before_the_capture_read_inputs_in_the_layout_of_graphs() -> None:
    """Some pipelines pack latents as a transposed view; the buffers of a graph are contiguous."""
    plain, layouts = models.model("flux"), list[bool]()

    def forward(module: nn.Module, arguments: Arguments) -> Tensor:
        layouts.append(arguments["hidden_states"].is_contiguous())
        return plain.forward(module, arguments)

    branch = shape(0)
    packed = branch.inputs["hidden_states"].mT.contiguous().mT
    assert not packed.is_contiguous()
    model = replace(plain, forward=forward)
    sharded = ShardedModel(model)
    with patch.object(steps, "GraphPool"), patch.object(steps, "CapturedStep", Recording):
        runner = StepRunner(model, sharded, config=CAPTURING, device=torch.device("cpu"))
        warm = [found_warm(runner, replace(branch, inputs={**branch.inputs, "hidden_states": packed})) for _ in "123"]
    sharded.close()
    assert (warm, set(layouts)) == ([False, False, True], {True})


@torch.no_grad()
def test_a_prediction_stays_what_it_was_when_the_graph_is_replayed(runner: StepRunner) -> None:
    branch = shape(0)
    other = replace(branch, inputs={**branch.inputs, LATENTS: 2 * branch.inputs[LATENTS]})
    expected = runner.run(branch, ALONE).clone()
    runner.run(branch, ALONE)
    replayed, after = runner.run(branch, ALONE), runner.run(other, ALONE)
    assert runner.was_warm
    torch.testing.assert_close(replayed, expected)
    assert not torch.allclose(after, expected)


def test_the_shape_that_came_longest_ago_goes_with_its_graph(runner: StepRunner) -> None:
    with patch.object(steps, "MAX_SHAPES", 2), patch.object(Recording, "close") as close:
        for number in (0, 1, 0, 2):
            found_warm(runner, shape(number))
            found_warm(runner, shape(number))
        assert close.call_count == 1
        assert found_warm(runner, shape(0)), "it came after the other"
        assert [found_warm(runner, shape(1)) for _ in range(3)] == [False, False, True]
        assert close.call_count == 2


class LastingPool:
    """Stands for a ``GraphPool``: like torch's, it takes no graph once all of its graphs are gone."""

    def __init__(self, device: torch.device) -> None:
        self.num_graphs: int | None = None


class PooledRecording(Recording):
    def __init__(self, function: Callable[[StepTensors], Tensor], example: StepTensors, pool: LastingPool) -> None:
        super().__init__(function, example, pool)
        assert pool.num_graphs != 0, "use_count > 0"
        self._pool, pool.num_graphs = pool, (pool.num_graphs or 0) + 1

    def close(self) -> None:
        assert self._pool.num_graphs
        self._pool.num_graphs -= 1


def test_a_step_is_captured_after_all_graphs_have_gone(runner: StepRunner) -> None:
    graphs: dict[str, Any] = {"GraphPool": LastingPool, "CapturedStep": PooledRecording}
    with patch.multiple(steps, MAX_SHAPES=2, **graphs):
        runner = StepRunner(models.model("flux"), runner._sharded, config=CAPTURING, device=torch.device("cpu"))
        for number in (0, 0, 1, 2, 2):  # the second shape has one step, and the third replaces the first
            found_warm(runner, shape(number))
        assert [found_warm(runner, shape(1)) for _ in range(2)] == [False, True]
        runner.release()
        assert [found_warm(runner, shape(0)) for _ in range(3)] == [False, False, True]


def test_a_step_that_has_no_memory_for_a_graph_runs_without_one(caplog: pytest.LogCaptureFixture) -> None:
    model = models.model("flux")
    sharded = ShardedModel(model)
    one_of_two = replace(ALONE, ranks=(0, 1))
    capture = Mock(side_effect=torch.OutOfMemoryError("tried to allocate 2 GiB"))
    with patch.object(steps, "GraphPool"), patch.object(steps, "CapturedStep", capture):
        runner = StepRunner(model, sharded, config=CAPTURING, device=torch.device("cpu"))
        first = runner.run(shape(0), ALONE)
        again = [runner.run(shape(0), ALONE) for _ in range(3)]
        runner.run(shape(0), one_of_two)
        with pytest.raises(torch.OutOfMemoryError):  # the other rank has recorded its own, and would wait
            runner.run(shape(0), one_of_two)
    sharded.close()
    assert all(one.equal(first) for one in again)
    assert capture.call_count == 2
    assert "no memory for its graph: tried to allocate 2 GiB" in caplog.text


class FullDevice:
    """Has memory for ``num_graphs`` at a time."""

    def __init__(self, num_graphs: int) -> None:
        self.num_left, self.num_asked = num_graphs, 0

    def capture(self, function: Callable[[StepTensors], Tensor], *_: object) -> Mock:
        self.num_asked += 1
        if not self.num_left:
            raise torch.OutOfMemoryError
        self.num_left -= 1
        return Mock(side_effect=function, close=self.free)

    def free(self) -> None:
        self.num_left += 1


def test_a_step_without_a_graph_gets_one_once_another_has_gone(runner: StepRunner) -> None:
    device = FullDevice(num_graphs=1)
    with patch.object(steps, "CapturedStep", device.capture), patch.object(steps, "MAX_SHAPES", 2):
        for number in (0, 0, 1, 1, 1):
            found_warm(runner, shape(number))
        assert device.num_asked == 2, "the second shape finds no room, and does not ask again"
        found_warm(runner, shape(2))  # replaces the first
        assert [found_warm(runner, shape(1)) for _ in range(2)] == [False, True], "it is captured"
        assert [found_warm(runner, shape(2)) for _ in range(2)] == [False, True]
        assert device.num_asked == 4


def test_ranks_of_two_halves_with_other_shapes_agree_on_what_the_whole_team_captures(runner: StepRunner) -> None:
    """One half's branches had two shapes; the other's (not seen here) may have had one."""
    with patch.object(steps, "MAX_SHAPES", 2):
        for number in (0, 1):
            assert [found_warm(runner, shape(number), HALF) for _ in range(3)] == [False, False, True]
        assert [found_warm(runner, shape(2)) for _ in range(3)] == [False, False, True]
