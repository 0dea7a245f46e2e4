"""A peer's step captured whole in one CUDA graph: the time of its kernels without Python between them.

This is the best that graphs of a project's own can give. It need not have any.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import rank_synchronize, relative_error

SUFFIX = "-captured"
"""End of the names of makers whose steps are captured."""
NUM_WARM_UP_STEPS = 3
MAX_ERROR = 0.01
"""Relative error between a replay and the eager step, which run the same kernels."""
NUM_PLACES = 3
"""Places in the code that an error names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CapturedPeer:
    """A step that replays its graph. Its answer lies in the graph's memory until the next replay."""

    graph: Any
    answer: Tensor
    error: float
    """Error relative to the answer of the eager step."""

    def __call__(self) -> Tensor:
        self.graph.replay()
        return self.answer

    def close(self) -> None:
        """Release the graph and its memory."""
        self.graph.reset()


@torch.inference_mode()
def captured(step: Callable[[], Tensor]) -> CapturedPeer:
    """Capture ``step``, which all ranks call. It reads its inputs where they are now.

    ValueError without a GPU. RuntimeError with the reason where the step cannot be captured. AssertionError if a replay
    does not give the step's answer.
    """
    if not torch.cuda.is_available():
        raise ValueError(f"a step is captured on a GPU alone: leave out makers that end with {SUFFIX}")
    expected = step().clone()
    graph, answer = _recorded(step)
    answer.zero_()
    graph.replay()
    return CapturedPeer(graph=graph, answer=answer, error=relative_error(answer, expected, MAX_ERROR))


def _recorded(step: Callable[[], Tensor]) -> tuple[Any, Tensor]:
    before, stream = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(before)
    with torch.cuda.stream(stream):
        for _ in range(NUM_WARM_UP_STEPS):
            step()
    before.wait_stream(stream)
    rank_synchronize()
    graph, causes = torch.cuda.CUDAGraph(), []
    try:
        # Threads of NCCL and of compilers may call CUDA meanwhile.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            try:
                answer = step()
            except Exception as error:
                causes.append(error)  # the end of a broken capture has an error of its own
                raise
    except Exception as error:
        reason = reason_of((*causes, error)[0])
        forget_capture(before)
        raise RuntimeError(f"the step cannot be captured: {reason}") from None
    return graph, answer


def forget_capture(stream: torch.cuda.Stream) -> None:
    """End what a broken capture leaves: its stream is the current one, and random numbers are refused outside it.

    ``stream`` is what was current before. The generator begins anew with its seed.
    """
    torch.cuda.set_stream(stream)
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    fresh = torch.Generator(generator.device).manual_seed(generator.initial_seed())
    generator.graphsafe_set_state(fresh.graphsafe_get_state())


def reason_of(error: BaseException) -> str:
    """Return type, first line and innermost places of ``error``, in few characters."""
    first, *_ = str(error).splitlines() or [""]
    frames = traceback.extract_tb(error.__traceback__)[: -NUM_PLACES - 1 : -1]
    places = (f"{'/'.join(frame.filename.split('/')[-2:])}:{frame.lineno}" for frame in frames)
    return f"{type(error).__name__}: {first[:200]} at {', called by '.join(places)}"
