"""Blocks in host memory give the same bits as on the device, with additions, with sleep, and after failures."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from engines.core import host_copy
from engines.core.engine import EngineChoice
from engines.core.model import Addition, DenoiserModel, LowRank
from engines.core.shard_plan import ShardPlan
from engines.core.weight_memory import WeightMemory
from engines.parallel import sharded
from engines.parallel.offload import BlockOffload, offloaded_blocks, offloaded_weights
from engines.torch_engine.config import resolve
from engines.torch_engine.engine import TorchEngine
from engines.torch_engine.options import TorchOptions, check
from tests.engines.support import models
from tests.engines.support.gloo import gang
from tests.engines.support.rank_resources import separate_rank_resources
from tests.support.flux_denoiser import as_denoiser

ADDED = ("transformer_blocks.0.attn.to_q.weight", "single_transformer_blocks.1.attn.to_v.weight")
LOW_RANK = LowRank(up_NR=torch.ones(128, 1), down_RK=torch.ones(1, 128), scale=0.1)
ADDITIONS: Mapping[str, Addition] = {"one": {"transformer": dict.fromkeys(ADDED, LOW_RANK)}}
NUM_BLOCKS = 4


@pytest.fixture
def model() -> DenoiserModel:
    return models.model.__wrapped__("flux")


def offloading(number: int) -> TorchOptions:
    return TorchOptions(offloaded_blocks=number)


def predictions(
    model: DenoiserModel, number: int, precision: str = "native", mixes: tuple[Any, ...] = ((), ())
) -> list[Tensor]:
    """Return the predictions of a step with each of ``mixes``."""
    step = models.branches("flux", "uneven")
    everyone = tuple(range(dist.get_world_size())) if dist.is_initialized() else (0,)
    with closing(TorchEngine(model, strategy="ulysses", precision=precision, options=offloading(number))) as engine:
        return [engine.predict(tuple(replace(branch, additions=mix) for branch in step), everyone)[0] for mix in mixes]


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(map(torch.equal, left, right))


@pytest.mark.parametrize(("precision", "number"), [("native", 1), ("native", 9), ("fp8", 3), ("int8", 2)])
def test_the_same_bits_as_without(precision: str, number: int) -> None:
    whole, offloaded = (predictions(models.model.__wrapped__("flux"), n, precision) for n in (0, number))
    assert equal(whole, offloaded)


@pytest.mark.parametrize("precision", ["native", "int8"])
def test_the_same_bits_with_loaded_values_in_host_memory(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    touched, moved = Mock(side_effect=host_copy.touched_memory), Mock()
    monkeypatch.setattr(host_copy, "touched_memory", touched)
    monkeypatch.setattr(sharded, "move_from_host", lambda parameters, device: moved([*parameters]))
    model = replace(models.model.__wrapped__("flux"), additions=ADDITIONS)
    mixes: tuple[Any, ...] = ((), (("one", 1.0),), (("one", 0.5),), ())
    found = []
    for option in (TorchOptions(), TorchOptions(originals_on_host=True)):
        with closing(TorchEngine(model, precision=precision, options=option)) as engine:
            steps = [
                tuple(replace(branch, additions=mix) for branch in models.branches("flux", "uneven")) for mix in mixes
            ]
            found.append([engine.predict(step, (0,))[0] for step in steps])
    weights = dict(model.modules["transformer"].named_parameters())
    assert {call.args[0] for call in touched.call_args_list} == {weights[name].nbytes for name in ADDED}
    num_moved = [len(call.args[0]) for call in moved.call_args_list]
    assert num_moved == ([2, 2] if precision == "native" else [2, 0]), "quantised weights stay on the host, as loaded"
    assert equal(*found)
    with pytest.raises(ValueError, match=r"torch\.originals_on_host is for models whose steps change weights in place"):
        resolve(model, torch.device("cpu"), precision="native", options=option, fast=True)


def test_the_same_bits_on_a_team() -> None:
    assert all(gang(2).run(compare_on_a_team))


def compare_on_a_team() -> bool:
    return equal(*(predictions(models.model.__wrapped__("flux"), n) for n in (0, 3)))


@pytest.mark.parametrize("precision", ["native", "int8"])
def test_the_same_bits_with_additions(precision: str) -> None:
    """A block that was copied before an addition is copied again."""
    mixes: tuple[Any, ...] = ((), (("one", 1.0),), (("one", 0.5),), ())
    several = [
        predictions(replace(models.model.__wrapped__("flux"), additions=ADDITIONS), n, precision, mixes)
        for n in (0, 2, NUM_BLOCKS)
    ]
    whole, *offloaded = several
    assert not torch.equal(whole[0], whole[1])
    assert torch.equal(whole[0], whole[3])
    assert all(equal(whole, other) for other in offloaded)


def test_the_same_bits_with_hoisted_inputs() -> None:
    """Layers of blocks compute them outside the blocks' forwards, so with these blocks in every step."""
    step = models.branches("wan", "even")
    answers: list[Tensor] = []
    for number in (0, 2):
        wan = models.model.__wrapped__("wan")
        assert wan.hoisted is not None
        with closing(TorchEngine(wan, options=offloading(number))) as engine:
            answers += engine.predict(step, (0,))
    assert torch.equal(*answers)


def test_blocks_run_from_two_buffers(model: DenoiserModel) -> None:
    module = model.modules["transformer"]
    blocks = offloaded_blocks(module, model.plan, NUM_BLOCKS)
    largest = max(sum(x.nbytes for x in block.parameters()) for block in blocks)
    places: list[int] = []
    with closing(TorchEngine(model, options=offloading(NUM_BLOCKS))) as engine:
        step = models.branches("flux", "even")
        expected = engine.predict(step, (0,))
        (offload,) = engine._sharded._offloads
        handles = [block.register_forward_pre_hook(lambda own, _: places.append(place(own))) for block in blocks]
        again = engine.predict(step, (0,))
        for handle in handles:
            handle.remove()
        buffers = [buffer_B.untyped_storage().data_ptr() for buffer_B in offload._buffers]
        hosts = {place(block) for block in blocks}
    assert torch.equal(*expected, *again)
    assert places in ([*buffers, *buffers], [*buffers[::-1], *buffers[::-1]])
    assert not hosts & {*buffers}
    assert 2 * largest <= offload.device_bytes < 2.1 * largest
    assert offload.num_copies == 2 * NUM_BLOCKS + 1, "one block ahead, that of the next step included"


def place(block: nn.Module) -> int:
    (storage,) = {each.untyped_storage().data_ptr() for each in block.parameters()}
    return storage


def test_blocks_are_spread_evenly() -> None:
    module = nn.Module()
    module.blocks = nn.ModuleList(nn.Linear(1, 1) for _ in range(8))
    plan = ShardPlan(streams=("image",), shards=(), gathers=(), linears=(), blocks=("blocks",))
    for number, expected in ((0, []), (1, [7]), (2, [3, 7]), (3, [2, 5, 7]), (8, [*range(8)]), (9, [*range(8)])):
        found = offloaded_blocks(module, plan, number)
        assert [i for i, block in enumerate(module.blocks) if block in found] == expected
    assert offloaded_weights(module, plan, 1) == {"blocks.7.weight", "blocks.7.bias"}


def test_a_forward_that_fails_leaves_its_block(model: DenoiserModel) -> None:
    step = models.branches("flux", "even")
    with closing(TorchEngine(model, options=offloading(NUM_BLOCKS))) as engine:
        expected = engine.predict(step, (0,))
        for block in offloaded_blocks(model.modules["transformer"], model.plan, NUM_BLOCKS)[1:3]:
            handle = block.register_forward_pre_hook(fail)
            with pytest.raises(RuntimeError, match="on purpose"):
                engine.predict(step, (0,))
            handle.remove()
            assert torch.equal(*engine.predict(step, (0,)), *expected)


def fail(_module: nn.Module, _args: object) -> None:
    raise RuntimeError("on purpose")


def test_an_engine_after_it_has_whole_blocks(model: DenoiserModel) -> None:
    before = predictions(model, 0)
    offloaded = predictions(model, 3)
    assert equal(before, offloaded)
    assert equal(before, predictions(model, 0))
    assert not any(isinstance(each, BlockOffload) for block in model.modules.values() for each in vars(block).values())


def test_offloaded_blocks_sleep(tmp_path: Path) -> None:
    with separate_rank_resources() as resources:
        memory = resources.get(WeightMemory)
        memory.open("cpu", tmp_path)
        with memory.region():
            model = models.model.__wrapped__("flux")
        for module in model.modules.values():
            memory.hold(module)
        step = models.branches("flux", "even")
        with closing(TorchEngine(model, options=offloading(3))) as engine:
            expected = engine.predict(step, (0,))
            (offload,) = engine._sharded._offloads
            for _ in range(2):
                memory.sleep()
                for buffer_B in offload._buffers:  # on a GPU they sleep too, and wake with the first sleep's content
                    buffer_B.zero_()
                memory.wake()
                assert torch.equal(*engine.predict(step, (0,)), *expected)


def test_steps_are_eager(model: DenoiserModel) -> None:
    choices = resolve(model, torch.device("cuda"), precision="native", options=offloading(1))
    assert (choices.compile_blocks, choices.fast, choices.capture) == (False, False, False)
    usual = resolve(model, torch.device("cuda"), precision="native", options=TorchOptions())
    assert usual.capture


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "number", "message"),
    [
        ("auto", 2, 1, "strategy 'auto': .* such as ulysses"),
        ("tensor", 2, 1, "strategy 'tensor': .* such as ulysses"),
        ("ulysses", 2, -1, "offloaded_blocks is -1; it must be 0"),
    ],
)
def test_what_is_refused(strategy: str, num_ranks: int, number: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(EngineChoice(strategy=strategy, num_ranks=num_ranks, options=offloading(number)))
    check(EngineChoice(strategy="ulysses", num_ranks=2, options=offloading(1)))
    check(EngineChoice(options=offloading(1)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["native", "fp8"])
def test_a_gpu_holds_two_blocks(precision: str) -> None:
    """The bytes equal those with weights on the GPU, eagerly, and the peak of memory is that of two blocks."""
    (step,) = models.branches("flux", "uneven")
    inputs = {name: x.to("cuda", torch.bfloat16 if x.ndim == 3 else None) for name, x in step.inputs.items()}
    inputs |= {name: inputs[name].to(torch.bfloat16) for name in ("pooled_projections", "timestep", "guidance")}
    branch = replace(step, inputs=inputs)
    answers: list[Tensor] = []
    peaks: list[int] = []
    for number in (0, 64):
        model = wide_model(number)
        weights = sum(x.nbytes for x in model.modules["transformer"].parameters())
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        quiet: dict[str, Any] = {"compiled": False, "fast": False, "capture": False}
        with closing(TorchEngine(model, precision=precision, options=offloading(number), **quiet)) as engine:
            answers += [engine.predict((branch,), (0,))[0] for _ in range(3)]
        peaks.append(torch.cuda.max_memory_allocated())
        del model, engine
    assert all(torch.equal(answers[0], other) for other in answers)
    assert peaks[1] < peaks[0] - 0.5 * weights * (0.5 if precision == "fp8" else 1.0)


def wide_model(number: int) -> DenoiserModel:
    """Return a model with most weights in its blocks, on the GPU or with ``number`` blocks in host memory."""
    model = as_denoiser(models.flux(num_heads=32, num_blocks=12).to(torch.bfloat16))
    module = model.modules["transformer"]
    stay = offloaded_weights(module, model.plan, number)
    for name, parameter in module.named_parameters():
        if name not in stay:
            parameter.data = parameter.data.to("cuda")
    for part in module.modules():
        for name, buffer in list(part.named_buffers(recurse=False)):
            setattr(part, name, buffer.to("cuda"))
    return model
