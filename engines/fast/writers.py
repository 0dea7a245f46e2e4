"""Where the weights of hand-ordered steps are no views of a module's: what must be told when those change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass

from torch import nn

from engines.core.additions import Writers, WriteWeight
from engines.fast.gemm import Float8Gemm


def writers_of(blocks: Iterable[object]) -> Writers:
    """Returns those of all float8 GEMMs in ``blocks``, which are records of GEMMs, by parameter."""
    writers: dict[nn.Parameter, tuple[WriteWeight, ...]] = {}
    for block in blocks:
        for gemm in _float8_in(block):
            for parameter, write in gemm.writers():
                writers[parameter] = (*writers.get(parameter, ()), write)
    return writers


def _float8_in(record: object) -> Iterator[Float8Gemm]:
    if isinstance(record, Float8Gemm):
        yield record
    elif is_dataclass(record):
        for field in fields(record):
            yield from _float8_in(getattr(record, field.name))
