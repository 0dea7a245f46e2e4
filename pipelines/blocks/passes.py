"""Run a step's blocks up to the transformer, and on from there.

Most loops call their blocks once per step, and one of the blocks calls the transformer. A loop over chunks of a clip
calls them once per chunk, and one of them loops over steps. It cannot be paused there, so it is run again from its
start at every step, with the previous answers. It stops where its solver would take a step without predictions. This
repeats the solver's work, which is small beside a forward, and needs no code per model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from diffusers.modular_pipelines.modular_pipeline import BlockState
from diffusers.schedulers.scheduling_utils import SchedulerMixin

from pipelines.blocks.stand_in import Call, Exchange, StandIn
from pipelines.blocks.state import BlocksState, Steps, copied, own_parts, put_away, taken_out, with_parts


@dataclass(frozen=True, kw_only=True, slots=True)
class Noted:
    """A step with recorded calls: the pipeline and the loop's state at the calling block, and that block's index."""

    state: BlocksState
    pipeline: Any
    loop_state: BlockState
    exchange: Exchange
    caller: int

    @property
    def call(self) -> Mapping[str, Any]:
        """The first forward's arguments."""
        return self.exchange.calls[0][1]


class _SolverReached(Exception):
    """A solver would take a step whose forwards are not made yet."""


def note(loop: Any, pipeline: Any, state: BlocksState, replaced: Mapping[str, Any]) -> Noted:
    """Record the calls of the next step, with the values ``replaced`` in place of the loop's own."""
    pipeline, exchange = _own(pipeline, state)
    exchange.earlier.extend(state.answers)
    loop_state = taken_out(copied(state.loop_state))
    for name, value in replaced.items():
        setattr(loop_state, name, value)
    if state.is_over_rounds:
        for solver in _solvers(pipeline):
            solver.step = _stopping(solver.step, exchange)
    place = 0
    with suppress(_SolverReached):
        for place, block in enumerate(loop.sub_blocks.values()):  # noqa: B007  # read after the loop
            _, loop_state = block(pipeline, loop_state, **state.steps[state.step])
            if exchange.calls:
                break
    assert exchange.calls, "no block of the loop calls a transformer"
    return Noted(state=state, pipeline=pipeline, loop_state=loop_state, exchange=exchange, caller=place)


def finish(loop: Any, pipeline: Any, noted: Noted, answers: tuple[Any, ...]) -> Mapping[str, Any]:
    """Return the step's changes of its job's state, given the transformer's ``answers`` to the calls of ``noted``."""
    state, blocks = noted.state, list(loop.sub_blocks.values())
    if not state.is_over_rounds:
        noted.exchange.answers = list(answers)
        return _after(blocks[noted.caller :], noted.pipeline, noted.loop_state, state)
    if not state.ends_round:
        return {"answers": (*state.answers, *answers)}
    pipeline, exchange = _own(pipeline, state)
    exchange.answers = [*state.answers, *answers]
    return {**_after(blocks, pipeline, taken_out(copied(state.loop_state)), state), "answers": ()}


def rehearse_rounds(
    loop: Any, pipeline: Any, begun: BlockState, rounds: Steps
) -> tuple[tuple[Mapping[str, Any], tuple[Call, ...]], ...]:
    """Return the steps of these rounds: each one's block arguments, and its forwards with blank predictions.

    No solver computes anything: a step returns its sample.
    """
    own, exchange = _with_exchange(with_parts(pipeline, own_parts(pipeline)))
    steps: list[tuple[Mapping[str, Any], tuple[Call, ...]]] = []

    def note_step(of: Mapping[str, Any], _prediction: Any, _timestep: Any, sample: Any, **_: Any) -> tuple[Any]:
        steps.append((of, tuple(exchange.calls)))
        exchange.calls.clear()
        return (sample,)

    loop_state = copied(begun)
    for one in rounds:
        for solver in _solvers(own):
            solver.step = partial(note_step, one)
        for block in loop.sub_blocks.values():
            _, loop_state = block(own, loop_state, **one)
    return tuple(steps)


def _own(pipeline: Any, state: BlocksState) -> tuple[Any, Exchange]:
    return _with_exchange(with_parts(pipeline, state.parts))


def _with_exchange(pipeline: Any) -> tuple[Any, Exchange]:
    exchange = Exchange()
    for part in vars(pipeline).values():
        if isinstance(part, StandIn):
            part.exchange = exchange
    return pipeline, exchange


def _after(blocks: list[Any], pipeline: Any, loop_state: BlockState, state: BlocksState) -> Mapping[str, Any]:
    for block in blocks:
        _, loop_state = block(pipeline, loop_state, **state.steps[state.step])
    return {"loop_state": put_away(loop_state), "parts": own_parts(pipeline)}


def _solvers(pipeline: Any) -> Iterator[Any]:
    return (part for part in own_parts(pipeline).values() if isinstance(part, SchedulerMixin))


def _stopping(step: Any, exchange: Exchange) -> Any:
    def stop_or_step(*args: Any, **kwargs: Any) -> Any:
        if exchange.calls:
            raise _SolverReached
        return step(*args, **kwargs)

    return stop_or_step
