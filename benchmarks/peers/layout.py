"""How a peer's ranks divide a step among them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

HEADS = ("num_key_value_heads", "num_attention_heads", "n_kv_heads")
"""Names in the configurations of transformers, of which the first that is there counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Of ``branches`` x ``ulysses`` x ``ring`` x ``tensor`` ranks those that share a sequence are neighbours."""

    branches: int = 1
    ulysses: int = 1
    ring: int = 1
    tensor: int = 1

    @property
    def sequence(self) -> int:
        """Ranks that share one."""
        return self.ulysses * self.ring

    @classmethod
    def of(cls, config: Mapping[str, Any], num_branches: int, num_ranks: int) -> Layout:
        """Each branch on ranks of its own where the ranks suffice, as both projects advise; in these Ulysses as far as
        the heads of attention divide, and a ring of such groups beyond."""
        branches = math.gcd(num_branches, num_ranks)
        sequence = num_ranks // branches
        ulysses = math.gcd(next(config[name] for name in HEADS if name in config), sequence)
        return cls(branches=branches, ulysses=ulysses, ring=sequence // ulysses)
