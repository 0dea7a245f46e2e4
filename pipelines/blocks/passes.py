"""Run a step's blocks up to the transformer, and on from there with its answers.

Most loops call their blocks once per step, and one of the blocks calls the transformer. A loop over chunks of a clip
calls them once per chunk, and one of them loops over steps. It cannot pause there, so it runs again from its start at
every step, with the previous answers. It stops where its solver would take a step without predictions. This repeats
the solver's work, which is small beside a forward, and needs no code per model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from diffusers.modular_pipelines.modular_pipeline import BlockState
from diffusers.schedulers.scheduling_utils import SchedulerMixin

from pipelines.blocks.recording_transformer import Call, Exchange, RecordingTransformer
from pipelines.blocks.state import (
    BlocksState,
    Steps,
    attach_generators,
    detach_generators,
    own_parts,
    shallow_copy,
    with_parts,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedStep:
    """A step with the calls of its transformer."""

    state: BlocksState
    """The job before the step, unchanged."""
    pipeline: Any
    """Copy of the pipeline with the job's own parts, whose transformers are the ``exchange``."""
    loop_state: BlockState
    """The loop's state at the calling block."""
    exchange: Exchange
    """The calls of the transformers, and later their answers."""
    caller: int
    """Index of the calling block."""

    @property
    def call(self) -> Mapping[str, Any]:
        """The first forward's arguments."""
        return self.exchange.calls[0][1]


class _SolverReached(Exception):
    """A solver would take a step without its forwards."""


def record_step(loop: Any, pipeline: Any, state: BlocksState, replaced: Mapping[str, Any]) -> RecordedStep:
    """Record the calls of the next step, with the values ``replaced`` in place of the loop's own."""
    pipeline, exchange = _with_exchange(with_parts(pipeline, state.parts))
    exchange.earlier.extend(state.answers)
    loop_state = attach_generators(shallow_copy(state.loop_state))
    for name, value in replaced.items():
        setattr(loop_state, name, value)
    if state.is_over_rounds:
        for solver in _solvers(pipeline):
            solver.step = _stop_after_calls(solver.step, exchange)
    place = 0
    with suppress(_SolverReached):
        for place, block in enumerate(loop.sub_blocks.values()):  # noqa: B007  # read after the loop
            _, loop_state = block(pipeline, loop_state, **state.steps[state.step])
            if exchange.calls:
                break
    assert exchange.calls, "no block of the loop calls a transformer"
    return RecordedStep(state=state, pipeline=pipeline, loop_state=loop_state, exchange=exchange, caller=place)


def finish_step(loop: Any, pipeline: Any, record: RecordedStep, answers: tuple[Any, ...]) -> Mapping[str, Any]:
    """Return the step's changes of its job's state, given the transformer's ``answers`` to the calls of ``record``."""
    state, blocks = record.state, list(loop.sub_blocks.values())
    if not state.is_over_rounds:
        record.exchange.answers = list(answers)
        return _run_blocks(blocks[record.caller :], record.pipeline, record.loop_state, state)
    if not state.ends_round:
        return {"answers": (*state.answers, *answers)}
    pipeline, exchange = _with_exchange(with_parts(pipeline, state.parts))
    exchange.answers = [*state.answers, *answers]
    return {**_run_blocks(blocks, pipeline, attach_generators(shallow_copy(state.loop_state)), state), "answers": ()}


def dry_run_rounds(
    loop: Any, pipeline: Any, start: BlockState, rounds: Steps
) -> tuple[tuple[Mapping[str, Any], tuple[Call, ...]], ...]:
    """Return the steps of ``rounds``: each one's block arguments, and its forwards with blank predictions.

    Solvers compute nothing: a step returns its sample.
    """
    own, exchange = _with_exchange(with_parts(pipeline, own_parts(pipeline)))
    steps: list[tuple[Mapping[str, Any], tuple[Call, ...]]] = []

    def record(arguments: Mapping[str, Any], _prediction: Any, _timestep: Any, sample: Any, **_: Any) -> tuple[Any]:
        steps.append((arguments, tuple(exchange.calls)))
        exchange.calls.clear()
        return (sample,)

    loop_state = shallow_copy(start)
    for one in rounds:
        for solver in _solvers(own):
            solver.step = partial(record, one)
        for block in loop.sub_blocks.values():
            _, loop_state = block(own, loop_state, **one)
    return tuple(steps)


def _with_exchange(pipeline: Any) -> tuple[Any, Exchange]:
    exchange = Exchange()
    for part in vars(pipeline).values():
        if isinstance(part, RecordingTransformer):
            part.exchange = exchange
    return pipeline, exchange


def _run_blocks(blocks: list[Any], pipeline: Any, loop_state: BlockState, state: BlocksState) -> Mapping[str, Any]:
    for block in blocks:
        _, loop_state = block(pipeline, loop_state, **state.steps[state.step])
    return {"loop_state": detach_generators(loop_state), "parts": own_parts(pipeline)}


def _solvers(pipeline: Any) -> Iterator[Any]:
    return (part for part in own_parts(pipeline).values() if isinstance(part, SchedulerMixin))


def _stop_after_calls(step: Any, exchange: Exchange) -> Any:
    def stop_or_step(*args: Any, **kwargs: Any) -> Any:
        if exchange.calls:
            raise _SolverReached
        return step(*args, **kwargs)

    return stop_or_step
