"""Frames decoded on several devices, on each a band of their rows, without a word in between.

Attention in the middle of a decoder sees the whole picture, which is small there: all compute that part, a few percent
of the work. After it each has its band and as many rows around it as the convolutions to come reach, fewer
after each block: the rows of the band are those of the whole, up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """The band number ``index`` of ``count``."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.index < self.count, self

    def rows(self, num_rows: int) -> tuple[int, int]:
        """Returns the first row, and the first one after."""
        assert self.count <= num_rows, f"{self.count} bands of {num_rows} rows"
        return num_rows * self.index // self.count, num_rows * (self.index + 1) // self.count


@contextmanager
def band_alone(decoder: Any, share: Share, num_rows: int) -> Iterator[None]:
    """Within it ``decoder`` answers latents of ``num_rows`` with the rows of ``share`` alone."""
    hooks = []
    if share.count > 1:
        hooks = [module.register_forward_hook(partial(_cut, rows)) for module, rows in _cuts(decoder, share, num_rows)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def margins(decoder: Any) -> tuple[int, ...]:
    """Returns how many rows on either side of a band are needed in front of each of the blocks after the middle, and in
    front of the last convolution."""
    needed = [_reach(decoder.conv_out)]
    for block in reversed(decoder.up_blocks):
        needed.append(-(-needed[-1] // _scale(block)) + _reach(block))
    return tuple(reversed(needed))


def scales(decoder: Any) -> bool:
    """Returns whether it is ``nn.Upsample`` that makes rows more in ``decoder``, of which alone the factor is known."""
    return any(isinstance(part, nn.Upsample) for part in decoder.modules())


def _cut(rows: slice, module: nn.Module, inputs: Any, output_BCFHW: Tensor) -> Tensor:
    return output_BCFHW[..., rows, :].contiguous()


def _cuts(decoder: Any, share: Share, num_rows: int) -> Iterator[tuple[nn.Module, slice]]:
    """Yields modules, and what is kept of the rows that each answers with."""
    start, stop = share.rows(num_rows)
    first, scale = 0, 1
    for module, margin in zip((decoder.mid_block, *decoder.up_blocks), margins(decoder), strict=True):
        first, scale = first * _scale(module), scale * _scale(module)
        low, high = max(0, scale * start - margin), min(scale * num_rows, scale * stop + margin)
        yield module, slice(low - first, high - first)
        first = low
    yield decoder.conv_out, slice(scale * start - first, scale * stop - first)


def _reach(module: nn.Module) -> int:
    """Rows of its input on either side of a row that the module looks at, or a few more: as if nothing in it ran in
    parallel, or after its upsampling."""
    kernels = (part.kernel_size[-2] for part in module.modules() if isinstance(part, nn.Conv2d | nn.Conv3d))
    return sum(size // 2 for size in kernels)


def _scale(module: nn.Module) -> int:
    scales: list[Any] = [part.scale_factor for part in module.modules() if isinstance(part, nn.Upsample)]
    return math.prod(int(scale[0] if isinstance(scale, tuple) else scale) for scale in scales)
