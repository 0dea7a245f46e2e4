"""Denoise a job with a pipeline's blocks for preparation and loop, one step at a time.

The blocks of a step run twice. In the first pass, stand-ins record the transformer's calls (one per branch of
guidance). In the second, stand-ins return the predictions. In between, the calls are data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from diffusers.modular_pipelines.modular_pipeline import BlockState, PipelineState
from torch import Tensor

from engines.core.engine import JobFailedError
from engines.core.logs import timed
from engines.core.model import Branch, Schedule
from engines.core.resources import LRUCache
from engines.parallel.division import shape_of
from pipelines.blocks import arguments, passes, tree
from pipelines.blocks.denoiser import apply_guidance, set_scale, set_solver, with_boundary
from pipelines.blocks.encoder import Conditioning, on_cpu, on_device
from pipelines.blocks.opened import OpenedPipeline
from pipelines.blocks.passes import RecordedStep
from pipelines.blocks.recording_transformer import Call
from pipelines.blocks.state import (
    BlocksState,
    KeptPredictions,
    LaterStage,
    NoiseState,
    Steps,
    attach_generators,
    detach_generators,
    own_parts,
    shallow_copy,
    with_parts,
)
from pipelines.request import MediaRequest, mix_of

MAX_JOBS = 32
"""Jobs with cached timesteps, as many as an engine caches values of."""
COUNTED = "num_inference_steps"
"""The step count that guiders use. Second-order schedules have more steps, and guidance would end half-way."""


def finite_flags(values: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Return a flag for each floating-point tensor in ``values``, on its device, without waiting."""
    tensors, _ = arguments.split(values)
    return tuple(x.isfinite().all() for x in tensors.values() if x.is_floating_point())


def check_finite(flags: tuple[Tensor, ...], request: MediaRequest, what: str) -> None:
    """Wait for ``flags``, and raise an error if one is false.

    ValueError names the adapters of ``request``; without any, ``JobFailedError``.
    """
    if all(map(bool, flags)):
        return
    problem = f"the {what} of this request are not finite (NaN or infinite)"
    if request.all_loras:
        names = ", ".join(lora.name for lora in request.all_loras)
        raise ValueError(f"{problem} with the adapters {names}: leave them out, or give them smaller scales")
    raise JobFailedError(f"{problem}: weights may be damaged, or the dtype too narrow (float16)")


class BlocksSampler:
    """Implementation of ``engines.core.engine.Sampler``."""

    def __init__(self, opened: OpenedPipeline) -> None:
        self._opened, self._blocks = opened, opened.blocks
        self._spec = opened.spec
        self._pipeline = opened.for_ranks
        self._decoder_reads = opened.input_names(opened.sections.decode) - {"generator"}
        self._is_fast = self._spec.fast_weights(opened.part_config(opened.transformers[0])) is not None
        self._records: tuple[RecordedStep, ...] = ()
        self._cached_timesteps: LRUCache[tuple[Steps, Tensor]] = LRUCache(MAX_JOBS)
        """Timesteps by the id of a job's steps; the entry holds them, so that the id stays unique."""

    def begin(self, request: MediaRequest, conditioning: Conditioning) -> BlocksState:
        first, *later = request.stages
        return self._begin(first, conditioning, later=later[0] if later else None)

    @cached_property
    def latent_upsampler(self) -> Any:
        """Makes the inputs of a second pass from the latents of the first; loaded at first use."""
        assert self._spec.latent_upsampler is not None
        with timed("load: latent upsampler"):
            return self._spec.latent_upsampler(self._opened.path, self._pipeline, self._opened.dtype)

    def _begin(
        self,
        request: MediaRequest,
        conditioning: Conditioning,
        inputs: Mapping[str, Any] = MappingProxyType({}),
        later: MediaRequest | None = None,
    ) -> BlocksState:
        """Return the state before the first step of a pass. ``inputs`` are those of its blocks beside the request's."""
        pipeline = with_parts(self._pipeline_of(request), own_parts(self._pipeline))
        set_scale(pipeline, request.true_cfg_scale, request.solver.guidance_scale_2)
        set_solver(pipeline, request.solver)
        values = self._values(request, conditioning)
        for name, value in inputs.items():
            values.set(name, value)
        reached = tree.run_until_loop(self._blocks, (self._opened.sections.denoise,), pipeline, values)
        assert reached is not None, "a pipeline without a loop was opened"
        loop, left = reached
        values.set("timesteps", on_cpu(values.get("timesteps")))  # blocks read them without a device synchronization
        block = tree.block_at(self._blocks, loop)
        loop_state, steps = tree.dry_run(block, pipeline, values)
        loop_state, is_over_rounds = detach_generators(loop_state), tree.is_over_rounds(block)
        if is_over_rounds:
            dry_run = passes.dry_run_rounds(block, pipeline, attach_generators(shallow_copy(loop_state)), steps)
            steps = tuple(step for step, _ in dry_run)
        elif getattr(loop_state, COUNTED, len(steps)) < len(steps):
            setattr(loop_state, COUNTED, len(steps))
        generator = values.get("generator")
        values.set("generator", None)
        return BlocksState(
            request=request,
            values=values,
            loop_state=loop_state,
            parts=own_parts(pipeline),
            loop=loop,
            left=left,
            steps=steps,
            is_over_rounds=is_over_rounds,
            negative=self._here(conditioning.negative, conditioning.dtype),
            computed=request.computed_steps(len(steps)),
            later=None if later is None else self._later(later, conditioning, generator),
        )

    def _later(self, request: MediaRequest, conditioning: Conditioning, generator: torch.Generator) -> LaterStage:
        own = conditioning.of_second_stage()
        values, negative = self._here(own.values, own.dtype), self._here(own.negative, own.dtype)
        here = replace(own, values=values or {}, negative=negative, dtype=self._opened.dtype)
        return LaterStage(request=request, conditioning=here, noise=NoiseState.of(generator))

    def num_steps(self, state: BlocksState) -> int:
        """Return the steps of the whole job, at its begin."""
        return len(state.steps) + (0 if state.later is None else state.later.request.num_inference_steps)

    def branches(self, state: BlocksState) -> tuple[Branch, ...]:
        branches = self._branches(state)
        reuses = state.kept is not None and state.kept.suit(branches)
        return () if reuses else branches

    def kinds(self, state: BlocksState) -> tuple[tuple[Branch, ...], ...]:
        """Return one step of each shape of the job's steps, in order, as far as it is known at its start."""
        if state.later is not None:
            then = self._begin(state.later.request, state.later.conditioning)
            return (*self.kinds(replace(state, later=None)), *self.kinds(then))
        if not state.is_over_rounds:
            return (self.branches(state),)
        loop, pipeline = tree.block_at(self._blocks, state.loop), self._pipeline_of(state.request)
        pipeline = with_parts(pipeline, state.parts)
        start = attach_generators(shallow_copy(state.loop_state))
        dry_run = passes.dry_run_rounds(loop, pipeline, start, state.steps[:1])
        steps = (tuple(self._branch(call, step) for call in calls) for step, calls in dry_run)
        return tuple({tuple(map(shape_of, branches)): branches for branches in steps}.values())

    def calls(self, state: BlocksState) -> tuple[Call, ...]:
        """Return the forwards of the step in the pipeline's own form."""
        return tuple(call for record in self._record(state) for call in record.exchange.calls)

    def advance(self, state: BlocksState, predictions: tuple[Tensor, ...]) -> BlocksState:
        kept = self._reusable(state, predictions)
        if not predictions:
            assert state.kept is not None
            predictions = state.kept.predictions
        record, *negative = self._record(state)
        self._records = ()
        if negative:
            predictions = (apply_guidance(predictions, state.request.true_cfg_scale),)
        config = self._opened.part_config(self._opened.transformers[0])
        pairs = zip(record.exchange.calls, predictions, strict=True)
        answers = tuple(self._spec.to_output(config, call, prediction) for (_, call), prediction in pairs)
        loop, pipeline = tree.block_at(self._blocks, state.loop), self._pipeline_of(state.request)
        changes = passes.finish_step(loop, pipeline, record, answers)
        state = replace(state, **changes, step=state.step + 1, kept=kept, enlarged=None)
        return self._begin_later(state, state.later) if state.later and state.step == len(state.steps) else state

    def _begin_later(self, state: BlocksState, later: LaterStage) -> BlocksState:
        """Return the state before the first step of the second pass. Errors are those of ``latents``."""
        made = self._finished(state, state.loop_state)
        check_finite(finite_flags(made), state.request, "latents")  # the second pass has adapters of its own
        upsampled = self.latent_upsampler(made)
        conditioning = replace(later.conditioning, noise=later.noise)
        inputs = {**upsampled.inputs, "noise_scale": later.request.solver.sigmas[0]}
        return replace(self._begin(later.request, conditioning, inputs), enlarged=upsampled.latents)

    def latents(self, state: BlocksState) -> Mapping[str, Any]:
        """Return the decoder's inputs, on the CPU. ValueError or JobFailedError if they are not finite.

        The flag is read after the copies, which wait for the device anyway.
        """
        made = self._finished(state, state.loop_state)
        flags = finite_flags(made)
        values = _on_cpu(made)
        check_finite(flags, state.request, "latents")
        return values

    def preview(self, state: BlocksState) -> Mapping[str, Any]:
        """Return the decoder's inputs of a running job, with an estimate of the final latents.

        The latents are returned as they are if the solver has no sigmas, or there is no prediction yet. Before the
        first step of a second pass, they have no noise; between two chunks of a clip, they are those of the first.
        """
        if state.enlarged is not None:
            return _on_cpu(self._finished(state, state.loop_state, state.enlarged))
        if state.is_over_rounds and state.step < len(state.steps):
            record, *_ = self._record(state)
            in_round = self._spec.round_values(record.loop_state, record.call)
            return _on_cpu(self._finished(state, record.loop_state, in_round))
        solver = state.parts.get("scheduler")
        sigmas, place = (getattr(solver, name, None) for name in ("sigmas", "step_index"))
        if sigmas is None or place is None:
            chunk = self._spec.finished_chunk(state.loop_state)
            return _on_cpu(self._finished(state, state.loop_state, chunk)) if chunk else self.latents(state)
        # The solver's own index: with strength, its schedule starts in the middle.
        expected = self._spec.estimate_final(state.loop_state, float(sigmas[min(place, len(sigmas) - 1)]))
        return _on_cpu(self._finished(state, state.loop_state, expected or {}))

    def _pipeline_of(self, request: MediaRequest) -> Any:
        return with_boundary(self._pipeline, request.solver)

    def _values(self, request: MediaRequest, conditioning: Conditioning) -> PipelineState:
        inputs = self._opened.inputs_of(request)
        if conditioning.noise is not None:
            inputs["generator"] = conditioning.noise.generator()
        values = self._opened.state(inputs)
        here = self._here(conditioning.values, conditioning.dtype)
        assert here is not None
        kinds = {name: kind for kind, names in conditioning.kinds.items() for name in names}
        for name, value in here.items():
            values.set(name, value, kinds.get(name))
        return values

    def _here(self, values: Mapping[str, Any] | None, encoded: torch.dtype) -> Mapping[str, Any] | None:
        """Return ``values`` on the device, with the encoder's dtype cast to the transformer's."""
        if values is None:
            return None
        dtypes = {encoded: self._opened.dtype}
        here = {name: on_device(value, self._opened.device, dtypes) for name, value in values.items()}
        return self._spec.pad_conditioning(here)

    def _record(self, state: BlocksState) -> tuple[RecordedStep, ...]:
        """Return the step's calls: the pipeline's own, then those for a negative prompt that it does not support."""
        if not self._records or self._records[0].state is not state:
            replaced = ({}, state.negative) if state.negative is not None else ({},)
            self._records = tuple(self._record_one(state, values) for values in replaced)
        return self._records

    def _record_one(self, state: BlocksState, replaced: Mapping[str, Any]) -> RecordedStep:
        loop, pipeline = tree.block_at(self._blocks, state.loop), self._pipeline_of(state.request)
        return passes.record_step(loop, pipeline, state, replaced)

    def _branches(self, state: BlocksState) -> tuple[Branch, ...]:
        schedule = Schedule(find=lambda: self._timesteps(state), step=state.step) if self._is_fast else None
        step = state.steps[state.step]
        additions = mix_of(state.request.loras)
        branches = (self._branch(call, step) for call in self.calls(state))
        attention = state.request.attention or ""
        return tuple(
            replace(branch, schedule=schedule, additions=additions, attention=attention) for branch in branches
        )

    def _reusable(self, state: BlocksState, predictions: tuple[Tensor, ...]) -> KeptPredictions | None:
        """Return the predictions that the next step reuses, if it makes no forwards."""
        after = state.step + 1
        if after == len(state.steps) or state.computed[after]:
            return None
        return KeptPredictions.of(self._branches(state), predictions) if predictions else state.kept

    def _branch(self, call: Call, step: Mapping[str, Any]) -> Branch:
        name, _ = call
        tensors, constants = arguments.split(self._adapted(call, step))
        here = {key: x.to(self._opened.models_device, non_blocking=True) for key, x in tensors.items()}
        return Branch(inputs=here, constants=constants, module=name)

    def _timesteps(self, state: BlocksState) -> Tensor:
        """Return the transformer's timestep in each step, cached for the latest jobs."""
        steps = state.steps
        _, timesteps = self._cached_timesteps.get(id(steps), lambda: (steps, self._record_timesteps(state)))
        return timesteps

    def _record_timesteps(self, state: BlocksState) -> Tensor:
        records = (self._record_one(replace(state, step=step), {}) for step in range(len(state.steps)))
        calls = zip((record.exchange.calls[0] for record in records), state.steps, strict=True)
        name = self._spec.timestep
        timesteps = [self._adapted(call, step)[name].flatten()[:1] for call, step in calls]
        return torch.cat(timesteps).to(self._opened.models_device)

    def _adapted(self, call: Call, step: Mapping[str, Any]) -> Mapping[str, Any]:
        name, inputs = call
        return self._spec.adapt_call(self._opened.part_config(name), inputs, step)

    def _finished(
        self, state: BlocksState, loop_state: BlockState, expected: Mapping[str, Any] = MappingProxyType({})
    ) -> dict[str, Any]:
        """Return the decoder's inputs on their own device."""
        loop_state = shallow_copy(loop_state)
        loop = tree.block_at(self._blocks, state.loop)
        nothing_yet = {} if state.step else {made.name: None for made in loop.intermediate_outputs}
        for name, value in {**nothing_yet, **vars(loop_state), **expected}.items():
            setattr(loop_state, name, value)
        values = PipelineState(dict(state.values.values), state.values.kwargs_mapping)
        loop.set_block_state(values, loop_state)
        tree.run(self._blocks, state.left, with_parts(self._pipeline_of(state.request), state.parts), values)
        names = sorted(name for name in self._decoder_reads if values.get(name) is not None)
        return {name: values.get(name) for name in names}


def _on_cpu(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: on_cpu(value) for name, value in values.items()}
