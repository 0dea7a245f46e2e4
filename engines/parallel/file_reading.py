"""Read byte ranges of files onto a device with several threads, and together with other ranks of the host.

A copy from a mapped file uses the driver's small buffer in one thread, far below the bandwidth of the bus. Here each
thread reads pieces into pinned memory and copies one piece while it reads the next.

Ranks that read together cut the ranges, in order, into buckets. Each rank reads one contiguous share of a bucket, and
an all-gather gives every rank the whole bucket. The host's memory is read once, and GPUs exchange the rest. Shares of
the next buckets are read while one is exchanged.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from engines.core.tensors import device_with_index
from engines.parallel.collectives import Axis, all_gather
from engines.parallel.mesh import ALONE

NUM_THREADS = 8
PIECE_BYTES = 2**22
"""Smaller ones stay in the processor's cache; each costs Python's lock, which all threads need."""
NUM_BUFFERS = 2
"""Per thread: one is filled while the GPU copies the other."""
BUCKET_BYTES = 2**28
"""Exchanged at a time."""
NUM_SHARES = 3
"""Shares of one rank in flight: one is exchanged while the next are read. They and a bucket are beside the weights."""


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


Reading = Future[Any]
"""A thread's part; its result is None or an event on the GPU, after its copies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """One rank's part of a bucket, which is being read."""

    bucket: list[Span]
    """Targets are the weights."""
    own_B: Tensor
    """Memory of the part, as large as that of the other ranks; the last of them fill theirs in part, or not at all."""
    num_bytes: int
    """Bytes that the rank reads."""
    readings: list[Reading]
    """One for each thread."""


class Pieces:
    """Pieces of spans. Threads that iterate over it at the same time share them."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self._left = cut(spans, PIECE_BYTES)
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Span]:
        while True:
            with self._lock:
                piece = next(self._left, None)
            if piece is None:
                return
            yield piece


class SpanReader:
    """Reads spans onto ``device``, with the other ranks of ``axis``, which make the same calls with equal files.

    The counts are of this rank: bytes that it read itself, bytes that other ranks read, and the seconds that it waited
    for either. If a rank raises, the others wait in the exchange: the process that started the ranks must end them.
    """

    def __init__(self, device: torch.device, axis: Axis = ALONE) -> None:
        self.device, self.axis = device_with_index(device), axis
        self.read_bytes = self.exchanged_bytes = 0
        self.read_s = self.exchange_s = 0.0
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="weights")
        self._local = threading.local()
        self._streams: list[Any] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()
        for stream in self._streams:  # after an error, copies may be under way
            stream.synchronize()

    def read(self, spans: Sequence[Span]) -> None:
        """Fill the targets. OSError if a file ends before a span does."""
        self._synchronize()  # freed memory may be in use until here
        if self.axis.size == 1:
            self._finish(self._begin(spans), sum(span.num_bytes for span in spans))
            return
        # Buckets are allocated on a thread of their own: they are no weights (``WeightMemory.region``).
        with ThreadPoolExecutor(1, thread_name_prefix="exchange of weights") as pool:
            pool.submit(self._read_together, spans).result()

    def _read_together(self, spans: Sequence[Span]) -> None:
        """Read and exchange bucket by bucket, in the same order on every rank.

        A share is copied into memory whose last exchange has ended, and is exchanged once it is on the device. So each
        exchange needs only earlier ones to end, even if the driver lets copies and allocations wait for a running one.
        """
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        largest = min(BUCKET_BYTES, sum(span.num_bytes for span in spans))
        room = torch.empty(NUM_SHARES, -(-largest // self.axis.size), dtype=torch.uint8, device=self.device)
        self._synchronize()
        places = itertools.cycle(room)
        shares = (self._begin_share(bucket, next(places)) for bucket in buckets(spans, BUCKET_BYTES))
        begun = deque(itertools.islice(shares, NUM_SHARES))
        while begun:
            share = begun.popleft()
            self._finish(share.readings, share.num_bytes)
            self._exchange(share)
            begun.extend(itertools.islice(shares, 1))

    def _begin_share(self, bucket: list[Span], room_B: Tensor) -> Share:
        own_B = room_B[: -(-sum(span.num_bytes for span in bucket) // self.axis.size)]
        spans = tuple(share_of(bucket, self.axis.index * own_B.numel(), own_B))
        num_bytes = sum(span.num_bytes for span in spans)
        return Share(bucket=bucket, own_B=own_B, num_bytes=num_bytes, readings=self._begin(spans))

    def _exchange(self, share: Share) -> None:
        """Fill the bucket's targets on every rank. Its share may be overwritten afterwards."""
        begun_s = time.monotonic()
        scatter(all_gather(share.own_B, self.axis).flatten(), share.bucket)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self.exchange_s += time.monotonic() - begun_s
        self.exchanged_bytes += sum(span.num_bytes for span in share.bucket) - share.num_bytes

    def _begin(self, spans: Iterable[Span]) -> list[Reading]:
        """Let each thread take pieces of the spans, after what was begun before."""
        pieces = Pieces(spans)
        read = self._read_on_gpu if self.device.type == "cuda" else _read_on_cpu
        return [self._threads.submit(read, pieces) for _ in range(NUM_THREADS)]

    def _finish(self, readings: Iterable[Reading], num_bytes: int) -> None:
        """Wait until all is on the device. Raise what a thread raised."""
        begun_s = time.monotonic()
        for copied in [reading.result() for reading in readings]:
            if copied is not None:
                copied.synchronize()
        self.read_s += time.monotonic() - begun_s
        self.read_bytes += num_bytes

    def _read_on_gpu(self, pieces: Pieces) -> Any:
        """Copy pieces to the GPU in the thread's own stream. Return an event after the last of them."""
        if not hasattr(self._local, "stream"):
            torch.cuda.set_device(self.device)  # each thread has its own current device and stream
            self._local.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            torch.cuda.set_stream(self._local.stream)
            self._streams.append(self._local.stream)
            self._local.turns = _pinned_turns()
        stream: Any = self._local.stream
        for piece in pieces:
            buffer_B, view, copied = next(self._local.turns)
            copied.synchronize()
            _read_into(view[: piece.num_bytes], piece)
            piece.target_B.copy_(buffer_B[: piece.num_bytes], non_blocking=True)
            copied.record(stream)
        return stream.record_event()

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
    """Yield the bytes of ``bucket`` from ``begin`` on that fit into ``own_B``, with their places in it as targets.

    Bytes that follow each other in a file are one span, whatever tensors they belong to.
    """
    at, run = 0, None
    for span in bucket:
        first, last = max(begin - at, 0), min(begin + own_B.numel() - at, span.num_bytes)
        start, stop = at + first - begin, at + last - begin
        at += span.num_bytes
        if first >= last:
            continue
        offset = span.offset + first
        if run is not None and (span.file, offset) == (run.file, run.offset + run.num_bytes):
            run = Span(file=run.file, offset=run.offset, target_B=own_B[stop - run.num_bytes - (last - first) : stop])
            continue
        if run is not None:
            yield run
        run = Span(file=span.file, offset=offset, target_B=own_B[start:stop])
    if run is not None:
        yield run


def scatter(bytes_B: Tensor, bucket: Iterable[Span]) -> None:
    """Copy the bytes of a bucket, in order, to its targets."""
    at = 0
    for span in bucket:
        span.target_B.copy_(bytes_B[at : at + span.num_bytes])
        at += span.num_bytes


def _read_on_cpu(pieces: Pieces) -> None:
    for piece in pieces:
        _read_into(piece.target_B.numpy().data, piece)


def _pinned_turns() -> Iterator[tuple[Tensor, memoryview, Any]]:
    """Yield ``NUM_BUFFERS`` pinned buffers of a thread in turn, each with an event for its last copy.

    Pinning takes milliseconds and the driver's lock, so a thread reads its first piece before it pins the next buffer.
    """
    made: list[tuple[Tensor, memoryview, Any]] = []
    for _ in range(NUM_BUFFERS):
        buffer_B = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
        made.append((buffer_B, buffer_B.numpy().data, torch.cuda.Event()))  # type: ignore[no-untyped-call]
        yield made[-1]
    yield from itertools.cycle(made)


def _read_into(view: memoryview, piece: Span) -> None:
    """Read ``piece`` into ``view``, which has its size, without the interpreter lock."""
    num_read = 0
    while num_read < len(view):
        num = os.preadv(piece.file, [view[num_read:]], piece.offset + num_read)
        if not num:
            raise OSError(f"a file of weights became {len(view) - num_read} bytes shorter while it was read")
        num_read += num
