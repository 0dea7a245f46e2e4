"""One job's way from noise to latents through a pipeline's preparing and looping blocks, a step at a time.

A step's blocks are run twice as far as the transformer: with stand-ins that note its calls (one a branch of guidance),
and, when these forwards were made, with stand-ins that answer. In between the calls are data.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from diffusers.modular_pipelines.modular_pipeline import BlockState, PipelineState
from torch import Tensor

from engines.core.additions import normal_mix
from engines.core.model import Branch, Schedule
from pipelines.blocks import arguments, tree
from pipelines.blocks.encoder import Conditioning, on_cpu, on_device
from pipelines.blocks.guidance import guided, set_scale
from pipelines.blocks.noise import put_away, taken_out
from pipelines.blocks.opened import OpenedPipeline
from pipelines.blocks.own_parts import copied, own_parts, with_parts
from pipelines.blocks.reuse import KeptPredictions
from pipelines.blocks.stand_in import Call, Exchange
from pipelines.caching import computed_steps
from pipelines.request import MediaRequest

Steps = tuple[Mapping[str, Any], ...]
MAX_JOBS = 32
"""As many as an engine keeps values of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlocksState:
    """A job before its step number ``step``. ``values`` are the pipeline's, as they were when the loop began;
    ``loop_state`` is the loop's own, ``parts`` are the job's own schedulers and guiders.

    ``loop`` and ``left`` are where the loop is among the blocks, and what comes after it on a rank. ``steps`` are what
    each step's blocks are called with. ``negative`` replaces values of the loop's for a second prompt.
    ``computed`` says which steps make forwards; ``kept`` is what the next one takes instead, if it makes none.
    """

    request: MediaRequest
    values: PipelineState
    loop_state: BlockState
    parts: Mapping[str, Any]
    loop: tree.Path
    left: tuple[tree.Path, ...]
    steps: Steps
    step: int = 0
    negative: Mapping[str, Any] | None = None
    computed: tuple[bool, ...]
    kept: KeptPredictions | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Noted:
    """A step whose calls are known: the pipeline and the loop's state at the block that called, and its place."""

    state: BlocksState
    pipeline: Any
    loop_state: BlockState
    exchange: Exchange
    caller: int


class BlocksSampler:
    """Implements ``engines.core.sampler.Sampler``."""

    def __init__(self, opened: OpenedPipeline) -> None:
        self._opened, self._blocks = opened, opened.blocks
        self._architecture = opened.architecture
        self._pipeline = opened.for_ranks
        self._decoder_reads = opened.input_names(opened.sections.decode) - {"generator"}
        self._is_fast = self._architecture.fast(opened.part_config(opened.transformers[0])) is not None
        self._noted: tuple[_Noted, ...] = ()
        self._known_timesteps: OrderedDict[int, tuple[Steps, Tensor]] = OrderedDict()
        """By the identity of a job's steps, which are held so that nothing else can have it."""

    def begin(self, request: MediaRequest, conditioning: Conditioning) -> BlocksState:
        pipeline = with_parts(self._pipeline, own_parts(self._pipeline))
        set_scale(pipeline, request.true_cfg_scale)
        values = self._values(request, conditioning)
        reached = tree.run_until_loop(self._blocks, (self._opened.sections.denoise,), pipeline, values)
        assert reached is not None, "a pipeline without a loop was opened"
        loop, left = reached
        values.set("timesteps", on_cpu(values.get("timesteps")))  # so that no block waits for the device to read one
        loop_state, steps = tree.rehearse(tree.block_at(self._blocks, loop), pipeline, values)
        values.set("generator", None)
        return BlocksState(
            request=request,
            values=values,
            loop_state=put_away(loop_state),
            parts=own_parts(pipeline),
            loop=loop,
            left=left,
            steps=steps,
            negative=self._here(conditioning.negative, conditioning.dtype),
            computed=computed_steps(request.cache, len(steps)),
        )

    def num_steps(self, state: BlocksState) -> int:
        return len(state.steps)

    def branches(self, state: BlocksState) -> tuple[Branch, ...]:
        branches = self._branches(state)
        takes_kept = state.kept is not None and state.kept.suit(branches)
        return () if takes_kept else branches

    def calls(self, state: BlocksState) -> tuple[Call, ...]:
        """The forwards of the step as the pipeline's blocks ask for them."""
        return tuple(call for noted in self._note(state) for call in noted.exchange.calls)

    def advance(self, state: BlocksState, predictions: tuple[Tensor, ...]) -> BlocksState:
        kept = self._kept(state, predictions)
        if not predictions:
            assert state.kept is not None
            predictions = state.kept.predictions
        noted, *negative = self._note(state)
        self._noted = ()
        if negative:
            predictions = (guided(predictions, state.request.true_cfg_scale),)
        config = self._opened.part_config(self._opened.transformers[0])
        calls = noted.exchange.calls
        noted.exchange.answers = [
            self._architecture.answer(config, call, prediction)
            for (_, call), prediction in zip(calls, predictions, strict=True)
        ]
        loop_state, step = noted.loop_state, state.steps[state.step]
        for block in list(tree.block_at(self._blocks, state.loop).sub_blocks.values())[noted.caller :]:
            _, loop_state = block(noted.pipeline, loop_state, **step)
        return replace(
            state, loop_state=put_away(loop_state), parts=own_parts(noted.pipeline), step=state.step + 1, kept=kept
        )

    def latents(self, state: BlocksState) -> Mapping[str, Any]:
        """What the decoding blocks read, on the CPU."""
        return self._finished(state, state.loop_state)

    def preview(self, state: BlocksState) -> Mapping[str, Any]:
        """The same from a running job, as its last step makes one expect them.

        Where the solver knows no sigmas, or nothing was predicted yet, the latents are what they are.
        """
        sigmas = getattr(state.parts.get("scheduler"), "sigmas", None)
        if sigmas is None:
            return self.latents(state)
        expected = self._architecture.estimate(state.loop_state, float(sigmas[min(state.step, len(sigmas) - 1)]))
        loop_state = copied(state.loop_state)
        for name, value in (expected or {}).items():
            setattr(loop_state, name, value)
        return self._finished(state, loop_state)

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
        """``values`` on the device; what an encoder computed in its dtype is in the transformer's."""
        if values is None:
            return None
        dtypes = {encoded: self._opened.dtype}
        here = {name: on_device(value, self._opened.device, dtypes) for name, value in values.items()}
        return self._architecture.filled(here)

    def _note(self, state: BlocksState) -> tuple[_Noted, ...]:
        """The step's calls: those of the pipeline itself, then those for a negative prompt that it does not know."""
        if not self._noted or self._noted[0].state is not state:
            replaced = ({}, state.negative) if state.negative is not None else ({},)
            self._noted = tuple(self._note_one(state, values) for values in replaced)
        return self._noted

    def _note_one(self, state: BlocksState, replaced: Mapping[str, Any]) -> _Noted:
        pipeline = with_parts(self._pipeline, state.parts)
        exchange = Exchange()
        for name in self._opened.transformers:
            getattr(pipeline, name).exchange = exchange
        loop_state = taken_out(copied(state.loop_state))
        for name, value in replaced.items():
            setattr(loop_state, name, value)
        for place, block in enumerate(tree.block_at(self._blocks, state.loop).sub_blocks.values()):
            _, loop_state = block(pipeline, loop_state, **state.steps[state.step])
            if exchange.calls:
                return _Noted(state=state, pipeline=pipeline, loop_state=loop_state, exchange=exchange, caller=place)
        raise AssertionError("no block of the loop calls a transformer")

    def _branches(self, state: BlocksState) -> tuple[Branch, ...]:
        schedule = Schedule(find=lambda: self._timesteps(state), step=state.step) if self._is_fast else None
        step = state.steps[state.step]
        additions = normal_mix(tuple((lora.name, lora.scale) for lora in state.request.loras))
        branches = (self._branch(call, step) for call in self.calls(state))
        return tuple(replace(branch, schedule=schedule, additions=additions) for branch in branches)

    def _kept(self, state: BlocksState, predictions: tuple[Tensor, ...]) -> KeptPredictions | None:
        """What the step after this one takes, if it makes no forwards."""
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
        """What the transformer gets as its timestep in each of the steps, kept for the jobs last asked for."""
        steps, known = state.steps, self._known_timesteps
        if id(steps) not in known:
            known[id(steps)] = (steps, self._noted_timesteps(state))
            while len(known) > MAX_JOBS:
                known.popitem(last=False)
        known.move_to_end(id(steps))
        return known[id(steps)][1]

    def _noted_timesteps(self, state: BlocksState) -> Tensor:
        notes = (self._note_one(replace(state, step=step), {}) for step in range(len(state.steps)))
        calls = zip((note.exchange.calls[0] for note in notes), state.steps, strict=True)
        name = self._architecture.timestep
        timesteps = [self._adapted(call, step)[name].flatten()[:1] for call, step in calls]
        return torch.cat(timesteps).to(self._opened.models_device)

    def _adapted(self, call: Call, step: Mapping[str, Any]) -> Mapping[str, Any]:
        name, inputs = call
        return self._architecture.adapted(self._opened.part_config(name), inputs, step)

    def _finished(self, state: BlocksState, loop_state: BlockState) -> Mapping[str, Any]:
        values = PipelineState(dict(state.values.values), state.values.kwargs_mapping)
        tree.block_at(self._blocks, state.loop).set_block_state(values, loop_state)
        tree.run(self._blocks, state.left, with_parts(self._pipeline, state.parts), values)
        names = sorted(name for name in self._decoder_reads if values.get(name) is not None)
        return {name: on_cpu(values.get(name)) for name in names}
