"""Host memory for a copy of weights: pinned up to a limit, the rest in an unlinked file in the page cache."""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
import time
from collections.abc import Container, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PIECE_BYTES = 2**28
"""Pinned by one call. No copy crosses a border between two pieces, which CUDA would refuse."""
NUM_THREADS = 4
"""Threads that touch and pin. CUDA alone takes page faults one by one. Beside an H200, 16 GiB took 10.6 s to pin, or
2.9 s to touch and 0.8 s to pin.
"""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HostPiece:
    """Bytes on the host."""

    bytes_B: Tensor
    """uint8."""
    is_pinned: bool
    """True if the kernel never swaps them out, and on a GPU host CUDA knows them."""


class TouchedMemory:
    """Host memory, by size, whose pages background threads touch before it is pinned, without a call to CUDA."""

    def __init__(self, threads: ThreadPoolExecutor | None = None) -> None:
        self._threads = threads or ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="touching")
        self._pieces: list[tuple[int, Future[RegisteredMemory]]] = []

    @property
    def num_bytes(self) -> int:
        """Bytes that were not taken yet."""
        return sum(size for size, _ in self._pieces)

    def prepare(self, size: int) -> None:
        """Begin to touch ``size`` bytes. Returns at once."""
        self._pieces.append((size, self._threads.submit(touched_memory, size)))

    def take(self, size: int) -> Future[RegisteredMemory]:
        """Return memory of ``prepare``, or begin to touch it now."""
        for number, (known, _) in enumerate(self._pieces):
            if known == size:
                return self._pieces.pop(number)[1]
        return self._threads.submit(touched_memory, size)

    def clear(self) -> None:
        """Release what was not taken."""
        for _, unused in self._pieces:
            unused.cancel()
        self._pieces.clear()


class HostCopy:
    """Host memory of a copy, allocated in the background.

    ``device`` is the device that is copied from. ``folder`` is where the file lies.
    """

    def __init__(self, device: torch.device, folder: Path) -> None:
        self._device, self._folder = device, folder
        self._pieces: list[Future[HostPiece]] = []
        self._sizes: list[int] = []
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="pinning")
        self._touched = TouchedMemory(self._threads)

    @property
    def num_bytes(self) -> int:
        """Bytes reserved so far, pinned or not."""
        return sum(self._sizes)

    @property
    def pinned_bytes(self) -> int:
        """Bytes pinned so far. Waits for the background threads."""
        return sum(piece.bytes_B.numel() for piece in self._wait() if piece.is_pinned)

    def prepare(self, num_bytes: int, *, pinned_bytes: int | None) -> None:
        """Begin to touch what ``reserve`` would pin, without a call to CUDA: a graph may be captured meanwhile."""
        begin = self.num_bytes + self._touched.num_bytes
        for size, is_pinned in _piece_sizes(begin, num_bytes, pinned_bytes):
            if is_pinned:
                self._touched.prepare(size)

    def reserve(self, num_bytes: int, *, pinned_bytes: int | None) -> None:
        """Begin to allocate what is missing of ``num_bytes``. At most ``pinned_bytes`` of all are pinned (None: all).

        Memory of ``prepare`` is used first, and released if it is not needed. The call returns at once. OSError from
        ``copy`` or ``fill`` if the file does not fit its disk.
        """
        missing = [*_piece_sizes(self.num_bytes, num_bytes, pinned_bytes)]
        touched = [self._touched.take(size) if is_pinned else None for size, is_pinned in missing]
        self._touched.clear()
        for (size, _), memory in zip(missing, touched, strict=True):
            self._sizes.append(size)
            self._pieces.append(self._threads.submit(self._allocate, size, memory))

    def copy(self, spans: Sequence[Tensor]) -> None:
        """Copy ``spans`` (uint8, one dim) to the host. They fit into ``num_bytes``."""
        for _, span_B, host_B in self._pairs(spans):
            host_B.copy_(span_B, non_blocking=True)
        self._synchronize()

    def fill(self, spans: Sequence[Tensor], *, gone: Container[int] = ()) -> None:
        """Copy back into the same ``spans``, in the same order, but not into those whose numbers are in ``gone``."""
        for number, span_B, host_B in self._pairs(spans):
            if number not in gone:
                span_B.copy_(host_B, non_blocking=True)
        self._synchronize()

    def _pairs(self, spans: Iterable[Tensor]) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield parts of the spans, with the span's number before and the host's part behind each."""
        pieces = iter(self._wait())
        host_B = torch.empty(0, dtype=torch.uint8)
        for number, span_B in enumerate(spans):
            while span_B.numel():
                if not host_B.numel():
                    host_B = next(pieces).bytes_B
                size = min(span_B.numel(), host_B.numel())
                yield number, span_B[:size], host_B[:size]
                span_B, host_B = span_B[size:], host_B[size:]

    def _wait(self) -> list[HostPiece]:
        begun_s = time.monotonic()
        pieces = [piece.result() for piece in self._pieces]
        if (waited_s := time.monotonic() - begun_s) > 0.1:
            logger.info("waited for host memory", extra={"waited_s": round(waited_s, 3), "num_bytes": self.num_bytes})
        return pieces

    def _allocate(self, size: int, touched: Future[RegisteredMemory] | None) -> HostPiece:
        """Pin ``touched``, whose thread has begun before this one; None: use a file."""
        if touched is None:
            return HostPiece(self._file_piece(size), is_pinned=False)
        return touched.result().pinned(self._device)

    def _file_piece(self, size: int) -> Tensor:
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self._folder) as file:
            os.posix_fallocate(file.fileno(), 0, size)  # a full disk raises here, not at a write to the mapping
            return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class RegisteredMemory(mmap.mmap):
    """Anonymous memory that CUDA may know. Its pages are given back to the kernel when no tensor uses them any more.

    CUDA must forget them before: it would refuse to pin other memory at the same address.
    """

    device: torch.device | None = None
    """The GPU that its pages are pinned for."""

    def pinned(self, device: torch.device) -> HostPiece:
        """Return all of it, which copies from and to ``device`` read directly. On a CPU it is not pinned."""
        bytes_B = torch.frombuffer(self, dtype=torch.uint8)
        return HostPiece(bytes_B, is_pinned=device.type != "cuda" or self._pin(bytes_B.data_ptr(), device))

    def _pin(self, address: int, device: torch.device) -> bool:
        """Pin the pages for CUDA. Return whether that worked: the container may limit locked memory."""
        with torch.cuda.device(device):
            error = int(_cudart().cudaHostRegister(address, len(self), 0))
            if error:
                logger.warning("%d bytes cannot be pinned (CUDA error %d): copies are slower", len(self), error)
                _forget_error(device)
        if not error:
            self.device, self.address = device, address
        return not error

    def __del__(self) -> None:
        if self.device is not None:
            with suppress(Exception), torch.cuda.device(self.device):  # the interpreter may be ending
                _cudart().cudaHostUnregister(self.address)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _forget_error(device: torch.device) -> None:
    """Launch a kernel: its check finds the error of the call before, and CUDA forgets that it had one."""
    with suppress(RuntimeError):
        torch.ones(1, device=device)


def _piece_sizes(begin: int, end: int, pinned_bytes: int | None) -> Iterator[tuple[int, bool]]:
    """Yield the sizes of the pieces between two bytes, and whether they are among the first ``pinned_bytes``."""
    limit = end if pinned_bytes is None else min(pinned_bytes, end)
    while begin < end:
        is_pinned = begin < limit
        size = min((limit if is_pinned else end) - begin, PIECE_BYTES)
        yield size, is_pinned
        begin += size


def touched_memory(num_bytes: int) -> RegisteredMemory:
    """Return new host memory whose pages are all there. Calls no CUDA, and lets other threads run."""
    memory = RegisteredMemory(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)  # fewer page faults; the kernel may decline
    torch.frombuffer(memory, dtype=torch.uint8)[:: mmap.PAGESIZE].zero_()
    return memory


def pinned_memory(num_bytes: int, device: torch.device) -> HostPiece:
    """Return host memory that copies from and to ``device`` read directly. On a CPU it is not pinned."""
    return touched_memory(num_bytes).pinned(device)
