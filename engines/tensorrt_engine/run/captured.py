"""A step in one CUDA graph, exchanges included."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engines.core.model import ModelInputs

NUM_WARM_UPS = 2


class CapturedStep:
    """``step`` captured with inputs of one shape. Every rank of the team captures and replays at the same time."""

    def __init__(self, step: Callable[[ModelInputs], Tensor], inputs: ModelInputs) -> None:
        self._inputs = {name: tensor.clone() for name, tensor in inputs.items() if tensor is not None}
        self._graph: torch.cuda.CUDAGraph | None = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(NUM_WARM_UPS):
                step(self._inputs)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            self._prediction = step(self._inputs)

    def __call__(self, inputs: ModelInputs) -> Tensor:
        assert self._graph is not None, "closed"
        for name, tensor in self._inputs.items():
            tensor.copy_(inputs[name])
        self._graph.replay()
        return self._prediction.clone()

    def close(self) -> None:
        """Release the graph; before the context whose work is in it."""
        self._graph = None
