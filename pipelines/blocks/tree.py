"""The tree of a pipeline's blocks, split into encoding, denoising (preparation and loop) and decoding."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from diffusers.modular_pipelines.modular_pipeline import (
    BlockState,
    ConditionalPipelineBlocks,
    LoopSequentialPipelineBlocks,
    PipelineState,
)

Path = tuple[str, ...]
"""Names of blocks, from the pipeline's root inwards."""
TEXT_PARTS = "text_"
"""Beginning of the names of models that prompts go through: encoders, conditioners, projections."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sections:
    """The outermost blocks of a pipeline, by the process that runs them: encoder, ranks, decoder."""

    encode: tuple[str, ...]
    """Names of the blocks before the loop's; they run in the encoder."""
    denoise: str
    """The block with the denoising loop."""
    decode: tuple[str, ...]
    """Names of the blocks after it; they run in the decoder."""

    @classmethod
    def of(cls, blocks: Any) -> Sections:
        """Split ``blocks`` at the denoising loop. ValueError unless exactly one of them holds it."""
        names = list(blocks.sub_blocks)
        loops = [name for name in names if _has_loop(blocks.sub_blocks[name])]
        if len(loops) != 1:
            raise ValueError(f"{type(blocks).__name__} has {len(loops)} blocks with a denoising loop; one is needed")
        place = names.index(loops[0])
        return cls(encode=tuple(names[:place]), denoise=loops[0], decode=tuple(names[place + 1 :]))


def _has_loop(block: Any) -> bool:
    return isinstance(block, LoopSequentialPipelineBlocks) or any(map(_has_loop, block.sub_blocks.values()))


def is_over_rounds(loop: Any) -> bool:
    """Return whether a round of ``loop`` takes several steps (chunks of a clip): its blocks receive no step number."""
    signatures = (inspect.signature(one.__call__).parameters.values() for one in loop.sub_blocks.values())
    names = [{one.name for one in signature} | {one.kind.name for one in signature} for signature in signatures]
    return not any({"i", "VAR_KEYWORD"} & each for each in names)


def block_at(blocks: Any, path: Path) -> Any:
    for name in path:
        blocks = blocks.sub_blocks[name]
    return blocks


def replace_blocks(blocks: Any, kind: type[Any], make: Callable[[], Any]) -> None:
    """Replace each block of exactly the class ``kind``, anywhere in ``blocks``, by a new one."""
    for name, block in blocks.sub_blocks.items():
        if type(block) is kind:
            blocks.sub_blocks[name] = make()
        else:
            replace_blocks(block, kind, make)


def insert_after(blocks: Any, kind: type[Any], name: str, make: Callable[[], Any]) -> None:
    """Insert a new block called ``name`` after each block of exactly the class ``kind``, anywhere in ``blocks``."""
    for place, block in reversed(list(enumerate(blocks.sub_blocks.values()))):
        if type(block) is kind:
            blocks.sub_blocks.insert(name, make(), place + 1)
        else:
            insert_after(block, kind, name, make)


def move_text_blocks(blocks: Any) -> None:
    """Move blocks that call a model of the text from the denoising section to the end of the encoding one.

    Ranks have no such models. If several workflows have the block, one is enough.
    """
    denoise, moved = Sections.of(blocks).denoise, dict[str, Any]()
    _take_text_blocks(blocks.sub_blocks[denoise], moved)
    for name, block in moved.items():
        blocks.sub_blocks.insert(name, block, list(blocks.sub_blocks).index(denoise))


def _take_text_blocks(block: Any, moved: dict[str, Any]) -> None:
    for name, inner in list(block.sub_blocks.items()):
        if inner.sub_blocks:
            _take_text_blocks(inner, moved)
        elif any(part.name.startswith(TEXT_PARTS) for part in inner.expected_components):
            moved.setdefault(name, block.sub_blocks.pop(name))


def run(blocks: Any, paths: Iterable[Path], pipeline: Any, state: PipelineState) -> None:
    """Run these blocks, which hold no denoising loop, in order; they write to ``state``."""
    for path in paths:
        block_at(blocks, path)(pipeline, state)


def leaves(blocks: Any, names: Iterable[str], state: PipelineState, outer: Path = ()) -> Iterator[Path]:
    """Yield the innermost blocks of ``names``, each after the previous ones have run, which conditions depend on."""
    for name in names:
        path = (*outer, name)
        block = block_at(blocks, path)
        inner: Iterable[str] = block.sub_blocks
        if isinstance(block, ConditionalPipelineBlocks):
            chosen = _active_branch(block, state)
            inner = () if chosen is None else (chosen,)
        elif not block.sub_blocks:
            yield path
        yield from leaves(blocks, inner, state, path)


def run_until_loop(
    blocks: Any, path: Path, pipeline: Any, state: PipelineState
) -> tuple[Path, tuple[Path, ...]] | None:
    """Run all blocks before the loop inside ``path``; return the paths of the loop and of the blocks after it.

    Conditional blocks are chosen when their turn comes. None if the block turned out to have no loop.
    """
    block = block_at(blocks, path)
    if isinstance(block, LoopSequentialPipelineBlocks):
        return path, ()
    if isinstance(block, ConditionalPipelineBlocks):
        name = _active_branch(block, state)
        return None if name is None else run_until_loop(blocks, (*path, name), pipeline, state)
    if not _has_loop(block):
        block(pipeline, state)
        return None
    names = list(block.sub_blocks)
    for place, name in enumerate(names):
        reached = run_until_loop(blocks, (*path, name), pipeline, state)
        if reached is not None:
            loop, left = reached
            return loop, (*left, *((*path, later) for later in names[place + 1 :]))
    return None


def _active_branch(block: Any, state: PipelineState) -> str | None:
    triggers = {name: state.get(name) for name in block.block_trigger_inputs if name is not None}
    name: str | None = block.select_block(**triggers) or block.default_block_name
    return name


def dry_run(loop: Any, pipeline: Any, state: PipelineState) -> tuple[BlockState, tuple[Mapping[str, Any], ...]]:
    """Return the loop's state before its first round, and the arguments of its blocks in each round."""
    steps: list[Mapping[str, Any]] = []
    states: list[BlockState] = []

    def record(components: Any, block_state: BlockState, **step: Any) -> tuple[Any, BlockState]:
        states.append(block_state)
        steps.append(step)
        return components, block_state

    recorder = copy.copy(loop)
    recorder.loop_step = record
    recorder.set_block_state = lambda state, block_state: None  # it reads outputs of steps
    recorder.set_progress_bar_config(disable=True)
    recorder(pipeline, PipelineState(dict(state.values), state.kwargs_mapping))
    if not steps:
        raise ValueError("the schedule has no steps")
    return states[0], tuple(steps)
