"""A weight source that reads slices and adds low-rank products to them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engines.additions.weights import merge
from engines.core.additions import Addition
from engines.core.model import WeightSource


@dataclass(frozen=True, kw_only=True, slots=True)
class MergingSource:
    """A ``WeightSource`` that adds ``additions``, each with its amount, to the weights that ``source`` reads."""

    source: WeightSource
    additions: tuple[tuple[float, Addition], ...]

    @property
    def device(self) -> torch.device:
        return self.source.device

    def fill(
        self, name: str, module: nn.Module, slices: Mapping[str, Any], leave_out: Collection[nn.Module] = ()
    ) -> None:
        self.source.fill(name, module, slices, leave_out)
        merge(module, ((amount, addition.get(name, {})) for amount, addition in self.additions), slices)
