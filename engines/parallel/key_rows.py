"""Attention to the unpadded keys of a layout, with the rows fixed or found when it runs.

Compiled code that holds rows is compiled again for each number of tokens. As an operation that finds them when it runs,
one compiled version serves all layouts of the same streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor

from engines.core.attention import Kernel, Prefix
from engines.core.layout import Rows, TokenLayout
from engines.core.resources import Numbered, rank_resources
from engines.parallel.local_attention import crop_keys

CropKeys = Callable[[Kernel, TokenLayout, int, int], Kernel]
"""``(local, layout, first, num)``: makes attention to the unpadded keys of chunks ``first`` to ``first + num - 1``,
which are given one after another."""


def fixed_rows(local: Kernel, layout: TokenLayout, first: int, num: int) -> Kernel:
    """Return a kernel that holds the rows: see ``CropKeys``."""
    return crop_keys(local, layout.valid_rows(first, num))


def rows_at_run_time(local: Kernel, layout: TokenLayout, first: int, num: int) -> Kernel:
    """Return a kernel that finds the rows of the current forward's layout: see ``CropKeys``."""
    return local if layout.num_chunks == 1 else _operation(local, streams_of(layout), first, num)


def as_operation(local: Kernel) -> Kernel:
    """Return ``local`` as one operation: compiled code then holds no choice that it makes by size."""
    return _operation(local, "", 0, 0)


def _operation(local: Kernel, streams: str, first: int, num: int) -> Kernel:
    number = rank_resources().get(LocalKernels).number_of(local)

    def kernel(
        q_BLHD: Tensor,
        k_BMGD: Tensor,
        v_BMGD: Tensor,
        /,
        *,
        mask_BM: Tensor | None = None,
        prefix: Prefix | None = None,
    ) -> tuple[Tensor, Tensor]:
        reach_L, place_M = (None, None) if prefix is None else prefix
        out_BLHD, lse_BHL = _attend(q_BLHD, k_BMGD, v_BMGD, mask_BM, reach_L, place_M, streams, first, num, number)
        return out_BLHD, lse_BHL

    return kernel


class CurrentLayout:
    """The layout of the forward that runs in this rank."""

    layout: TokenLayout | None = None


@contextmanager
def forward_over(layout: TokenLayout) -> Iterator[None]:
    """Run kernels in this context over ``layout``."""
    current = rank_resources().get(CurrentLayout)
    before, current.layout = current.layout, layout
    try:
        yield
    finally:
        current.layout = before


def streams_of(layout: TokenLayout) -> str:
    """Return the names of a layout's streams, by which ``current_layout`` finds it."""
    return " ".join(name for name, _ in layout.lengths)


def current_layout(streams: str) -> TokenLayout:
    """Return the current forward's layout of all its streams, or of one that attends alone."""
    layout = rank_resources().get(CurrentLayout).layout
    assert layout is not None, "kernels that find their rows run in `forward_over`"
    return layout if streams_of(layout) == streams else layout.of_stream(streams)


@lru_cache(maxsize=256)
def valid_rows(layout: TokenLayout, first: int, num: int) -> Rows | None:
    """Return ``layout.valid_rows``, which each attention of a step needs."""
    return layout.valid_rows(first, num)


class LocalKernels(Numbered[Kernel]):
    """Kernels of one device."""


@torch.library.custom_op("troupe::attend_rows", mutates_args=())
def _attend(
    q_BLHD: Tensor,
    k_BMGD: Tensor,
    v_BMGD: Tensor,
    mask_BM: Tensor | None,
    reach_L: Tensor | None,
    place_M: Tensor | None,
    streams: str,
    first: int,
    num: int,
    number: int,
) -> tuple[Tensor, Tensor]:
    rows = valid_rows(current_layout(streams), first, num) if streams else None
    kernel = crop_keys(rank_resources().get(LocalKernels)[number], rows)
    prefix = None if reach_L is None or place_M is None else Prefix(reach_L, place_M)
    out_BLHD, lse_BHL = kernel(q_BLHD, k_BMGD, v_BMGD, mask_BM=mask_BM, prefix=prefix)
    return out_BLHD.contiguous(), lse_BHL.contiguous()


@_attend.register_fake
def _(q_BLHD: Tensor, k_BMGD: Tensor, v_BMGD: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    batch, length, heads, _dim = q_BLHD.shape
    out_BLHD = torch.empty_like(q_BLHD, memory_format=torch.contiguous_format)
    return out_BLHD, q_BLHD.new_empty((batch, heads, length), dtype=torch.float32)
