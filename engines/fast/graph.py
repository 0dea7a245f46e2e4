"""A whole step in one CUDA graph: kernels, copies and collectives are recorded once and replayed with one call."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from engines.core.model import StepTensors
from engines.core.tensors import device_with_index
from engines.fast.interface import GRAPH_PRIORITY, named_stream

NUM_WARM_UP_RUNS = 2
"""Uncaptured runs before recording: they compile kernels, create handles and open NCCL channels."""


class GraphPool:
    """Memory shared by all graphs of a process. Such graphs must not run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device_with_index(device)
        self.stream = named_stream(self.device, "graphs", priority=GRAPH_PRIORITY)
        self.handle: Any = torch.cuda.graph_pool_handle()
        self._inputs: WeakValueDictionary[Hashable, Tensor] = WeakValueDictionary()
        """Buffers that at least one graph reads."""

    def input(self, name: str, like: Tensor) -> Tensor:
        """Return the buffer from which graphs of this pool read an input of that name, shape and dtype."""
        key = (name, tuple(like.shape), like.dtype)
        buffer = self._inputs.get(key)
        if buffer is None:
            buffer = self._inputs[key] = torch.empty_like(like, memory_format=torch.contiguous_format)
        return buffer


class CapturedStep:
    """``function`` of named tensors, recorded for the shapes of ``example``.

    All ranks of a team capture at the same time and replay in the same order. The result lies in the graph's memory and
    is valid until the pool's next replay.
    """

    def __init__(self, function: Callable[[StepTensors], Tensor], example: StepTensors, pool: GraphPool) -> None:
        self._function = function  # keeps alive what the kernels read: weights, tables, other ranks' memory
        self._inputs = {name: pool.input(name, like=tensor) for name, tensor in example.items()}
        self._fill(example)
        self._graph = torch.cuda.CUDAGraph()
        pool.stream.wait_stream(torch.cuda.current_stream(pool.device))
        with torch.no_grad(), torch.cuda.stream(pool.stream):
            for _ in range(NUM_WARM_UP_RUNS):
                function(self._inputs)
        pool.stream.synchronize()
        # Other threads (watchdogs, a server's event loop) may call CUDA while this one records.
        capture = torch.cuda.graph(self._graph, pool=pool.handle, stream=pool.stream, capture_error_mode="thread_local")
        with torch.no_grad(), capture:
            self._result = function(self._inputs)

    def __call__(self, tensors: StepTensors) -> Tensor:
        """Copy ``tensors`` in, except the buffers themselves, and replay on the current stream."""
        self._fill(tensors)
        self._graph.replay()
        return self._result

    def _fill(self, tensors: StepTensors) -> None:
        for name, buffer in self._inputs.items():
            if tensors[name] is not buffer:
                buffer.copy_(tensors[name])

    @property
    def inputs(self) -> StepTensors:
        """Buffers that the graph reads. Other graphs of its pool may have overwritten them since."""
        return self._inputs

    def close(self) -> None:
        """Release the recording and its memory, while the communicator is still alive.

        The result goes too: a pool without graphs whose memory is still referenced accepts no new graph.
        """
        self._graph.reset()
        self._result = torch.empty(0)
        self._inputs = {}
        del self._function
