"""Division of a peer's step among ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from engines.core.spec import ParallelSpec

HEADS = ("num_key_value_heads", "num_attention_heads", "n_kv_heads")
"""Names in configurations of transformers. The first that is present counts."""


def layout_of(config: Mapping[str, Any], num_branches: int, num_ranks: int) -> ParallelSpec:
    """Return each branch on its own ranks if the ranks suffice, as both projects advise.

    Within a branch: Ulysses as far as the heads of attention divide, and a ring of such groups beyond. Ranks that share
    a sequence are neighbours.
    """
    branches = math.gcd(num_branches, num_ranks)
    sequence = num_ranks // branches
    ulysses = math.gcd(next(config[name] for name in HEADS if name in config), sequence)
    return ParallelSpec(guidance=branches, ulysses=ulysses, ring=sequence // ulysses)
