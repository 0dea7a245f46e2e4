"""Token layout of a split sequence: equal, padded chunks per stream, for any length and number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

Rows = tuple[tuple[int, int], ...]
"""Half-open ranges of rows, in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLayout:
    """Equal chunks of each stream; the last ones are zero-padded at the stream's end.

    Context rank r holds chunk r of all streams together ("text_r | image_r").
    """

    lengths: tuple[tuple[str, int], ...]
    """Pairs of stream and number of tokens, in attention's concatenation order."""
    num_chunks: int
    """Chunks of a stream: the size of the team's context axis."""

    @classmethod
    def of(cls, streams: tuple[str, ...], lengths: Mapping[str, int], num_chunks: int) -> TokenLayout:
        missing = set(streams) - set(lengths)
        if missing:
            raise ValueError(f"stream_lengths gave {sorted(lengths)}, but the shard plan names {list(streams)}")
        return cls(lengths=tuple((name, int(lengths[name])) for name in streams), num_chunks=num_chunks)

    @property
    def num_tokens(self) -> int:
        return sum(length for _, length in self.lengths)

    @property
    def chunk_length(self) -> int:
        """Tokens of all streams per rank, padding included."""
        return sum(self.chunk(stream) for stream, _ in self.lengths)

    def of_stream(self, stream: str) -> TokenLayout:
        """Return the layout of one stream's tokens alone."""
        return TokenLayout(lengths=((stream, self.length(stream)),), num_chunks=self.num_chunks)

    def length(self, stream: str) -> int:
        return dict(self.lengths)[stream]

    def chunk(self, stream: str) -> int:
        return -(-self.length(stream) // self.num_chunks)

    def valid_rows(self, first: int, num: int) -> Rows | None:
        """Return the unpadded rows of chunks ``first`` to ``first + num - 1``, concatenated; None: all of them."""
        rows: list[tuple[int, int]] = []
        start = 0
        for index in range(first, first + num):
            for stream, length in self.lengths:
                chunk = self.chunk(stream)
                valid = min(max(length - index * chunk, 0), chunk)
                _append(rows, start, start + valid)
                start += chunk
        return None if rows == [(0, start)] else tuple(rows)

    def cut(self, x: Tensor, *, dim: int, stream: str, index: int) -> Tensor:
        """Return chunk ``index`` of ``x``, whose dim ``dim`` is the whole stream, zero-padded.

        It is a tensor of its own: compiled code is made anew for views, and for each place in their memory.
        """
        length, chunk = self.length(stream), self.chunk(stream)
        if x.shape[dim] != length:
            raise ValueError(f"dim {dim} of {tuple(x.shape)} should be stream {stream!r} with {length} tokens")
        start = min(index * chunk, length)
        stop = min(start + chunk, length)
        piece = x.narrow(dim, start, stop - start)
        if stop - start == chunk:
            return piece.clone(memory_format=torch.contiguous_format)
        after = x.ndim - 1 - (dim % x.ndim)
        return functional.pad(piece, [0, 0] * after + [0, chunk - (stop - start)])

    def cut_streams(self, x: Tensor, *, dim: int, streams: tuple[str, ...], index: int) -> Tensor:
        """Return chunk ``index`` of each of ``streams``, which are concatenated along dim ``dim`` of ``x``."""
        if len(streams) == 1:
            return self.cut(x, dim=dim, stream=streams[0], index=index)
        lengths = [self.length(stream) for stream in streams]
        parts = zip(torch.split(x, lengths, dim), streams, strict=True)
        return torch.cat([self.cut(part, dim=dim, stream=stream, index=index) for part, stream in parts], dim)

    def join(self, gathered: Tensor, *, dim: int, stream: str) -> Tensor:
        """Return the whole stream from its chunks, stacked along a new first dim; ``dim`` is a chunk's token dim."""
        dim = dim % (gathered.ndim - 1)
        joined = gathered.movedim(0, dim).flatten(dim, dim + 1)
        return joined.narrow(dim, 0, self.length(stream))


def _append(rows: list[tuple[int, int]], start: int, stop: int) -> None:
    if stop == start:
        return
    if rows and rows[-1][1] == start:
        rows[-1] = (rows[-1][0], stop)
    else:
        rows.append((start, stop))
