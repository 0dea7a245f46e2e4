"""Values hoisted out of a schedule's steps equal what each step would compute, and are computed once a job."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from operator import sub
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from engines.core.layout import TokenLayout
from engines.core.model import LATENTS, Arguments, Branch, ModelInputs, Schedule, max_hoisted_bytes
from engines.core.spec import ParallelSpec
from engines.parallel.mesh import team_of_one
from engines.planner.machine import H200
from engines.planner.profile import profile
from engines.planner.step_cost import StepCost
from engines.torch_engine.fast_step import FastStep
from engines.torch_engine.hoisted import HoistedCache
from pipelines.checkpoint import Checkpoint
from pipelines.directory import read_config
from pipelines.models.flux.fast import FluxWeights
from pipelines.models.flux.spec import SHARD_PLAN, SPEC
from pipelines.models.registry import spec_of
from tests.engines.support import models

TIMESTEPS_S = torch.tensor([0.9, 0.6, 0.2])


def parts() -> tuple[Branch, Any, FastStep]:
    (branch,) = models.branches("flux", "even")
    weights = FluxWeights(models.transformer("flux"), "native")
    layout = TokenLayout.of(SHARD_PLAN.streams, SPEC.stream_lengths({}, branch.inputs), 1)
    fast = FastStep(weights, team_of_one(), layout, latents=branch.inputs[LATENTS])
    return branch, weights, fast


def at_step(branch: Branch, step: int, timesteps_S: torch.Tensor = TIMESTEPS_S) -> Branch:
    now_B = timesteps_S[step : step + 1].repeat(2)
    schedule = Schedule(find=lambda: timesteps_S, step=step)
    return replace(branch, inputs={**branch.inputs, "timestep": now_B}, schedule=schedule)


@torch.no_grad()
def test_a_schedule_gives_what_single_steps_give() -> None:
    branch, weights, fast = parts()
    cache = HoistedCache()
    for step in (0, 1, 2):
        scheduled = cache.step_tensors(at_step(branch, step), weights, fast)
        alone = HoistedCache().step_tensors(replace(at_step(branch, step), schedule=None), weights, fast)
        assert scheduled.keys() == alone.keys()
        for name, tensor in scheduled.items():
            torch.testing.assert_close(tensor, alone[name])


@torch.no_grad()
def test_entries_of_a_batch_may_be_at_different_times() -> None:
    branch, weights, fast = parts()
    timestep_B = torch.tensor([0.8, 0.3])
    mixed = replace(branch, inputs={**branch.inputs, "timestep": timestep_B})
    expected = models.transformer("flux")(**mixed.inputs)[0]
    torch.testing.assert_close(
        fast(fast.tokens(mixed.inputs[LATENTS]), HoistedCache().step_tensors(mixed, weights, fast)), expected
    )


@torch.no_grad()
def test_a_job_computes_once_and_another_job_again() -> None:
    branch, weights, fast = parts()
    cache = HoistedCache()
    with patch.object(weights, "scheduled", wraps=weights.scheduled) as scheduled:
        for step in (0, 1, 2):
            cache.step_tensors(at_step(branch, step), weights, fast)
        assert scheduled.call_count == 1
        cache.step_tensors(at_step(branch, 0, TIMESTEPS_S.clone()), weights, fast)
        assert scheduled.call_count == 2


@torch.no_grad()
def test_jobs_with_other_additions_to_the_weights_compute_again() -> None:
    """Their inputs may be the same tensors: a prompt is encoded once for all of them."""
    branch, weights, fast = parts()
    cache, module, mixes = HoistedCache(), torch.nn.Identity(), [(), (("one", 0.5),), (("one", 1.0),)]
    jobs = [replace(at_step(branch, 0), additions=mix) for mix in mixes]
    with (
        patch.object(weights, "scheduled", wraps=weights.scheduled) as scheduled,
        patch.object(fast, "hoisted", wraps=fast.hoisted) as hoisted,
    ):
        for job in (*jobs, *jobs):
            cache.step_tensors(job, weights, fast)
        assert (scheduled.call_count, hoisted.call_count) == (len(mixes), len(mixes))
    hoist = Mock(return_value={})
    for job in (*jobs, *jobs):
        cache.module_inputs(job, module, hoist)
    assert hoist.call_count == len(mixes)


@torch.no_grad()
def test_tensors_changed_in_place_are_not_taken_for_the_old_ones() -> None:
    branch, weights, fast = parts()
    cache = HoistedCache()
    before = cache.step_tensors(branch, weights, fast)["text_TBC"]
    text = branch.inputs["encoder_hidden_states"]
    text.mul_(2)
    after = cache.step_tensors(branch, weights, fast)["text_TBC"]
    text.div_(2)
    assert not torch.equal(before, after)


@torch.no_grad()
def test_a_step_is_never_taken_for_one_that_went() -> None:
    """A new step could have the address of a deleted one: the cache keeps steps as long as results."""
    branch, weights, fast = parts()
    cache, is_there = HoistedCache(), weakref.ref(fast)
    cache.step_tensors(branch, weights, fast)
    del fast
    gc.collect()
    assert is_there()
    cache.clear()
    gc.collect()
    assert not is_there()


def test_the_least_recently_used_entry_is_evicted() -> None:
    cache, computed = HoistedCache(max_bytes=2 * 32), []  # room for two results
    texts = [torch.full((8,), float(number)) for number in range(3)]

    def hoist(_module: torch.nn.Module, inputs: ModelInputs) -> ModelInputs:
        computed.append(int(inputs["text"][0]))
        return {"more": inputs["text"] + 1}

    module = torch.nn.Identity()
    for number in (0, 1, 0, 2, 0, 1):
        result = cache.module_inputs(Branch(inputs={"text": texts[number]}), module, hoist)
        torch.testing.assert_close(result["more"], texts[number] + 1)
    assert computed == [0, 1, 2, 1]


def test_branches_that_share_inputs_share_one_result() -> None:
    """A large result is freed before the next one takes memory; constants and other inputs do not matter."""
    cache, computed = HoistedCache(hoisted_inputs=("clip",), min_entries=1, max_bytes=1), []
    clips = [torch.full((8,), float(number)) for number in range(2)]
    results = list[weakref.ref[torch.Tensor]]()

    def hoist(_module: torch.nn.Module, arguments: Arguments) -> ModelInputs:
        computed.append(int(arguments["clip"][0]))
        assert all(result() is None for result in results)
        more = arguments["clip"] + 1
        results.append(weakref.ref(more))
        return {"more": more}

    module = torch.nn.Identity()
    for number, is_negative in ((0, False), (0, True), (0, False), (1, False), (1, True), (0, True)):
        inputs = {"clip": clips[number], "text": torch.zeros(1)}
        branch = Branch(inputs=inputs, constants={"is_negative": is_negative})
        assert torch.equal(cache.module_inputs(branch, module, hoist)["more"], clips[number] + 1)
    assert computed == [0, 1, 0]


def test_what_two_branches_take_turns_with_stays_however_large() -> None:
    cache, computed = HoistedCache(max_bytes=1), []
    texts = [torch.full((8,), float(number)) for number in range(3)]

    def hoist(_module: torch.nn.Module, arguments: Arguments) -> ModelInputs:
        computed.append((int(arguments["text"][0]), arguments["rows"]))
        return {"more": arguments["text"] + arguments["rows"]}

    def more(number: int, rows: int) -> torch.Tensor:
        branch = Branch(inputs={"text": texts[number]}, constants={"rows": rows})
        return cache.module_inputs(branch, module, hoist)["more"]

    module = torch.nn.Identity()
    for number in (0, 1, 0, 1, 2, 1, 0):
        torch.testing.assert_close(more(number, 4), texts[number] + 4)
    assert computed == [(0, 4), (1, 4), (2, 4), (0, 4)]
    torch.testing.assert_close(more(0, 5), texts[0] + 5)
    assert computed[-1] == (0, 5), "constants tell results apart"


def test_results_of_an_ended_job_go_before_others_take_memory() -> None:
    """New tensors may have the addresses of the ended job's."""
    cache, results = HoistedCache(), list[weakref.ref[torch.Tensor]]()

    def hoist(_module: torch.nn.Module, arguments: Arguments) -> ModelInputs:
        assert all(result() is None for result in results)
        more = arguments["text"] + 1
        results.append(weakref.ref(more))
        return {"more": more}

    module = torch.nn.Identity()
    for number in range(3):
        text = torch.full((8,), float(number))
        assert torch.equal(cache.module_inputs(Branch(inputs={"text": text}), module, hoist)["more"], text + 1)
        del text
    assert len(results) == 3


@pytest.mark.parametrize("name", ["LTX-2", "Wan2.2-T2V-A14B", "ideogram-4"])
@pytest.mark.parametrize("gib", [80, 24])
def test_two_jobs_with_guidance_take_turns_at_every_step_as_far_as_memory_is_counted(name: str, gib: int) -> None:
    """The prompts have full length. Jobs that ended earlier take no memory."""
    path = Checkpoint.of_configuration(name).path
    config, spec = read_config(path, "transformer"), spec_of(path)
    one, made = 2 * spec.hoisted_numbers(config), list[int]()
    counted = replace(profile(models.model("wan")), hoisted_numbers=one // 2, dtype=torch.bfloat16)
    layout = TokenLayout(lengths=(("video", 1),), num_chunks=1)
    machine = replace(H200, memory_bytes=gib * 2**30)
    steps = (StepCost(each, layout, ParallelSpec(), machine) for each in (counted, replace(counted, hoisted_numbers=0)))
    num_counted = round(sub(*(step.memory_bytes() for step in steps)) / one) - 1  # without the captured step's

    def hoist(_module: torch.nn.Module, arguments: Arguments) -> ModelInputs:
        made.append(int(arguments["text"]))
        return {"keys": torch.empty(one, dtype=torch.uint8, device="meta")}

    cache, module = HoistedCache(max_bytes=max_hoisted_bytes(machine.memory_bytes)), torch.nn.Identity()
    for number in range(9):
        cache.module_inputs(Branch(inputs={"text": torch.tensor(number)}), module, hoist)
    texts = [torch.tensor(-number) for number in range(num_counted)]
    for text in 3 * texts:
        cache.module_inputs(Branch(inputs={"text": text}), module, hoist)
    assert num_counted == (2 if (name, gib) == ("LTX-2", 24) else 4)
    assert made[9:] == [0, -1, -2, -3][:num_counted]
