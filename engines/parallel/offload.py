"""Blocks of a module in host memory: each is copied to the device one block ahead, and stays there only while it runs.

Two buffers on the device take turns. While one block runs from the first, the next offloaded one is copied into the
second, on a stream of its own. The result has the same bytes as that of a module that is whole on the device.
Offloaded blocks are spread evenly, so that the copies hide behind the blocks between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engines.core.host_copy import NUM_THREADS, pinned_memory
from engines.core.shard_plan import ShardPlan
from engines.core.torch_private import version_of

ALIGNMENT = 256
"""Bytes between the beginnings of tensors in a buffer are a multiple of this, as in CUDA's own allocations."""
NUM_BUFFERS = 2
RUNNER = "_run_offloaded"
"""Attribute of an offloaded block: the context manager that holds its weights on the device."""


def offloaded_blocks(module: nn.Module, plan: ShardPlan, number: int) -> list[nn.Module]:
    """Return ``number`` of the blocks of ``module``, spread evenly, in running order; all if there are fewer."""
    blocks = plan.blocks_of(module)
    number = min(number, len(blocks))
    return [block for i, block in enumerate(blocks) if (i + 1) * number // len(blocks) > i * number // len(blocks)]


def offloaded_weights(module: nn.Module, plan: ShardPlan, number: int) -> frozenset[str]:
    """Return the names of the parameters in the ``offloaded_blocks``."""
    own = {id(each) for block in offloaded_blocks(module, plan, number) for each in block.parameters()}
    return frozenset(name for name, each in module.named_parameters() if id(each) in own)


@contextmanager
def on_device(block: nn.Module) -> Iterator[None]:
    """Hold the weights of ``block`` on the device, if it is offloaded: for layers that run outside its call.

    Calls hold their own weights. Contexts of several blocks may not overlap.
    """
    runner = vars(block).get(RUNNER)
    if runner is None:
        yield
        return
    with runner():
        yield


class _HostBlock:
    """A block whose parameters and buffers are views of one piece of host memory."""

    def __init__(self, block: nn.Module, host_B: Tensor) -> None:
        self.block, self.host_B = block, host_B
        self._tensors = _tensors_of(block)
        self._hosts = self._views(host_B)
        with torch.no_grad():
            for tensor, host in zip(self._tensors, self._hosts, strict=True):
                host.copy_(tensor.data)
        self._places = {host_B.data_ptr(): self._hosts}
        self.leave()

    @property
    def version(self) -> int:
        """A number that changes with every change of the tensors in place, as by adapters."""
        return sum(map(version_of, self._tensors))

    def enter(self, buffer_B: Tensor) -> None:
        """Let the tensors be those in a buffer, which holds a copy of ``host_B``."""
        key = buffer_B.data_ptr()
        if key not in self._places:
            self._places[key] = self._views(buffer_B)
        self._point_to(self._places[key])

    def leave(self) -> None:
        """Let the tensors be those in host memory."""
        self._point_to(self._hosts)

    def _point_to(self, views: Sequence[Tensor]) -> None:
        for tensor, view in zip(self._tensors, views, strict=True):
            tensor.data = view

    def _views(self, bytes_B: Tensor) -> list[Tensor]:
        views: list[Tensor] = []
        begin = 0
        for tensor in self._tensors:
            dense = torch.empty_like(tensor, device="meta")  # the strides of a tensor without gaps
            piece = bytes_B[begin : begin + tensor.nbytes].view(tensor.dtype)
            views.append(piece.as_strided(dense.shape, dense.stride()))
            begin += _aligned(tensor.nbytes)
        return views


class BlockOffload:
    """Keeps ``blocks``, which run in this order, in host memory, and copies them to ``device`` for their forwards.

    A block that runs out of order is copied when it begins. Blocks must have their final weights; later changes in
    place (additions) are made in host memory, between forwards.
    """

    def __init__(self, blocks: Sequence[nn.Module], device: torch.device) -> None:
        sizes = [sum(_aligned(tensor.nbytes) for tensor in _tensors_of(block)) for block in blocks]
        with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="pinning") as pool:
            hosts = list(pool.map(partial(_host_memory, device), sizes))
        self._blocks = [_HostBlock(block, host_B) for block, host_B in zip(blocks, hosts, strict=True)]
        largest = max(sizes, default=0)
        self._buffers = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(NUM_BUFFERS)]
        self._held: list[tuple[int, int] | None] = [None] * NUM_BUFFERS
        """Index and version of the block whose copy each buffer holds."""
        self._running: tuple[int, int] | None = None
        """Index of the block that runs, and of its buffer."""
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._copied, self._left = _events(), _events()
            for event in self._left:  # what used the buffers' memory before is on this stream
                event.record(torch.cuda.current_stream(device))
        self.num_copies = 0
        """Copies of blocks to the device so far."""
        self._handles = [
            handle
            for index, block in enumerate(blocks)
            for handle in (
                block.register_forward_pre_hook(partial(self._begin, index), prepend=True),
                block.register_forward_hook(self._end),
            )
        ]
        for index, block in enumerate(blocks):
            vars(block)[RUNNER] = partial(self._run, index)

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockOffload:
        """Return itself: copies of a module, hooks included, share its tensors."""
        return self

    @property
    def device_bytes(self) -> int:
        """Memory of the buffers."""
        return sum(buffer_B.nbytes for buffer_B in self._buffers)

    def forget_copies(self) -> None:
        """Copy each block again at its next forward: the buffers may lose their values (``WeightMemory.sleep``)."""
        self._leave_running()
        if self._stream is not None:
            self._stream.synchronize()
        self._held = [None] * NUM_BUFFERS

    def close(self) -> None:
        """Leave the blocks in host memory, without hooks."""
        self.forget_copies()
        for handle in self._handles:
            handle.remove()
        for own in self._blocks:
            vars(own.block).pop(RUNNER, None)

    @contextmanager
    def _run(self, index: int) -> Iterator[None]:
        self._begin(index)
        try:
            yield
        finally:
            self._leave_running()

    def _begin(self, index: int, *_call: object) -> None:
        self._leave_running()  # that of a forward that failed
        held = (index, self._blocks[index].version)
        if held not in self._held:
            self._copy(index, 0)
        buffer = self._held.index(held)
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._copied[buffer])
        self._blocks[index].enter(self._buffers[buffer])
        self._running = index, buffer
        following = (index + 1) % len(self._blocks)
        if (following, self._blocks[following].version) not in self._held:
            self._copy(following, 1 - buffer)

    def _end(self, _module: nn.Module, _args: object, _output: object) -> None:
        self._leave_running()

    def _leave_running(self) -> None:
        if self._running is None:
            return
        index, buffer = self._running
        self._running = None
        self._blocks[index].leave()
        if self._stream is not None:
            self._left[buffer].record(torch.cuda.current_stream(self._stream.device))

    def _copy(self, index: int, buffer: int) -> None:
        """Begin to copy a block into a buffer, once the block that ran from there is done."""
        block = self._blocks[index]
        target_B = self._buffers[buffer][: block.host_B.numel()]
        self.num_copies += 1
        if self._stream is None:
            target_B.copy_(block.host_B)
        else:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(self._left[buffer])
                target_B.copy_(block.host_B, non_blocking=True)
                self._copied[buffer].record(self._stream)
        self._held[buffer] = index, block.version


def _events() -> list[torch.cuda.Event]:
    """Return an event for each buffer."""
    return [torch.cuda.Event() for _ in range(NUM_BUFFERS)]  # type: ignore[no-untyped-call]


def _tensors_of(block: nn.Module) -> list[Tensor]:
    return [tensor for tensor in (*block.parameters(), *block.buffers()) if tensor.numel()]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _host_memory(device: torch.device, num_bytes: int) -> Tensor:
    if device.type == "cuda":
        return pinned_memory(num_bytes, device).bytes_B
    return torch.empty(num_bytes, dtype=torch.uint8)  # in storages that can sleep
