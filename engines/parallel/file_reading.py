"""Read byte ranges of files onto a device with several threads, and together with other ranks of the host.

A copy from a mapped file uses the driver's small buffer in one thread, far below the bandwidth of the bus. Here each
thread reads pieces into pinned memory and copies one piece while it reads the next.

Ranks that read together cut the ranges, in order, into buckets. Each rank reads one contiguous share of a bucket, and
an all-gather gives every rank the whole bucket. The host's memory is read once, and GPUs exchange the rest.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Self

import torch
from torch import Tensor

from engines.core.tensors import device_with_index
from engines.parallel.collectives import Axis, all_gather
from engines.parallel.mesh import ALONE

NUM_THREADS = 8
PIECE_BYTES = 2**23
NUM_BUFFERS = 2
"""Per thread: one is filled while the GPU copies the other."""
BUCKET_BYTES = 2**28
"""Exchanged at a time. A device needs memory for one bucket and one share of it beside the weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A byte range of an open file, and where it goes."""

    file: int
    """Descriptor."""
    offset: int
    """First byte."""
    target_B: Tensor
    """Contiguous uint8 of a device; its size is that of the range."""

    @property
    def num_bytes(self) -> int:
        return self.target_B.numel()

    def part(self, begin: int, end: int) -> Span:
        """Return the bytes from ``begin`` to ``end`` of the span."""
        return Span(file=self.file, offset=self.offset + begin, target_B=self.target_B[begin:end])


class SpanReader:
    """Reads spans onto ``device``, with the other ranks of ``axis``, which make the same calls with equal files.

    The counts are of this rank: bytes that it read itself, bytes that other ranks read, and the seconds of both.
    If a rank raises, the others wait in the exchange: whoever started the ranks has to end them.
    """

    def __init__(self, device: torch.device, axis: Axis = ALONE) -> None:
        self.device, self.axis = device_with_index(device), axis
        self.read_bytes = self.exchanged_bytes = 0
        self.read_s = self.exchange_s = 0.0
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="weights")
        self._local = threading.local()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()

    def read(self, spans: Sequence[Span]) -> None:
        """Fill the targets. OSError if a file ends before a span does."""
        if self.axis.size == 1:
            self._read_own(spans)
            return
        # Buckets are allocated on a thread of their own: they are no weights (``WeightMemory.region``).
        with ThreadPoolExecutor(1, thread_name_prefix="exchange of weights") as pool:
            pool.submit(self._read_together, spans).result()

    def _read_together(self, spans: Sequence[Span]) -> None:
        """Read and exchange bucket by bucket.

        Every rank exchanges in the same order, and each exchange has ended before the next share is read. So no copy
        from the host waits for a rank that waits for this one.
        """
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        largest = min(BUCKET_BYTES, sum(span.num_bytes for span in spans))
        room_B = torch.empty(-(-largest // self.axis.size), dtype=torch.uint8, device=self.device)
        for bucket in buckets(spans, BUCKET_BYTES):
            num_bytes = sum(span.num_bytes for span in bucket)
            own_B = room_B[: -(-num_bytes // self.axis.size)]
            share = tuple(share_of(bucket, self.axis.index * own_B.numel(), own_B))
            self._read_own(share)
            begun_s = time.monotonic()
            scatter(all_gather(own_B, self.axis).flatten(), bucket)
            self._synchronize()
            self.exchange_s += time.monotonic() - begun_s
            self.exchanged_bytes += num_bytes - sum(span.num_bytes for span in share)

    def _read_own(self, spans: Sequence[Span]) -> None:
        begun_s = time.monotonic()
        self._synchronize()  # freed memory may be in use until here
        pieces: SimpleQueue[Span] = SimpleQueue()
        for piece in cut(spans, PIECE_BYTES):
            pieces.put(piece)
        read = self._read_on_gpu if self.device.type == "cuda" else _read_on_cpu
        for done in [self._threads.submit(read, pieces) for _ in range(NUM_THREADS)]:
            done.result()
        self.read_s += time.monotonic() - begun_s
        self.read_bytes += sum(span.num_bytes for span in spans)

    def _read_on_gpu(self, pieces: SimpleQueue[Span]) -> None:
        """Copy pieces to the GPU in the thread's own stream."""
        if not hasattr(self._local, "stream"):
            torch.cuda.set_device(self.device)  # each thread has its own current device
            self._local.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            buffers = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(NUM_BUFFERS)]
            self._local.turns = itertools.cycle([(buffer, torch.cuda.Event()) for buffer in buffers])  # type: ignore[no-untyped-call]
        stream: Any = self._local.stream
        for piece in _taken(pieces):
            buffer_B, copied = next(self._local.turns)
            copied.synchronize()
            part_B = buffer_B[: piece.num_bytes]
            _read_into(part_B, piece)
            with torch.cuda.stream(stream):
                piece.target_B.copy_(part_B, non_blocking=True)
                copied.record(stream)
        stream.synchronize()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def cut(spans: Iterable[Span], num_bytes: int) -> Iterator[Span]:
    """Yield the spans in parts of at most ``num_bytes``."""
    for span in spans:
        for begin in range(0, span.num_bytes, num_bytes):
            yield span.part(begin, min(begin + num_bytes, span.num_bytes))


def buckets(spans: Iterable[Span], num_bytes: int) -> Iterator[list[Span]]:
    """Yield the spans in order, in lists of ``num_bytes`` altogether (the last: of the rest), cut where needed."""
    bucket, room = list[Span](), num_bytes
    for span in spans:
        begin = 0
        while begin < span.num_bytes:
            end = min(begin + room, span.num_bytes)
            bucket.append(span.part(begin, end))
            room -= end - begin
            begin = end
            if not room:
                yield bucket
                bucket, room = [], num_bytes
    if bucket:
        yield bucket


def share_of(bucket: Iterable[Span], begin: int, own_B: Tensor) -> Iterator[Span]:
    """Yield the bytes of ``bucket`` from ``begin`` on that fit into ``own_B``, with their places in it as targets."""
    at = 0
    for span in bucket:
        first, last = max(begin - at, 0), min(begin + own_B.numel() - at, span.num_bytes)
        if first < last:
            start = at + first - begin
            target_B = own_B[start : start + last - first]
            yield Span(file=span.file, offset=span.offset + first, target_B=target_B)
        at += span.num_bytes


def scatter(bytes_B: Tensor, bucket: Iterable[Span]) -> None:
    """Copy the bytes of a bucket, in order, to its targets."""
    at = 0
    for span in bucket:
        span.target_B.copy_(bytes_B[at : at + span.num_bytes])
        at += span.num_bytes


def _read_on_cpu(pieces: SimpleQueue[Span]) -> None:
    for piece in _taken(pieces):
        _read_into(piece.target_B, piece)


def _taken(pieces: SimpleQueue[Span]) -> Iterator[Span]:
    while True:
        try:
            yield pieces.get_nowait()
        except Empty:
            return


def _read_into(target_B: Tensor, piece: Span) -> None:
    """Read ``piece`` into ``target_B`` on the CPU, without the interpreter lock."""
    view = target_B.numpy().data
    num_read = 0
    while num_read < len(view):
        num = os.preadv(piece.file, [view[num_read:]], piece.offset + num_read)
        if not num:
            raise OSError(f"a file of weights became {len(view) - num_read} bytes shorter while it was read")
        num_read += num
