"""What a plan holds, read from the program text inside it. DIAGNOSTICS ONLY: the format is undocumented.

Without a GPU a plan cannot be deserialized, so TensorRT's engine inspector is out of reach. Plans of TensorRT-RTX 1.7
carry their compiled program as text; this reader counts what is in it and returns None for anything it does not know.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

_PROGRAM_START = b"header {\n  version = 5"
_PROGRAM_ENDS = (b"#undef __HAS", b"header {\n  version = 4")
_INSTRUCTION = re.compile(r"^\s+([a-z_0-9]+)=\{ name=\"?([^\"\s]+)\"?", re.MULTILINE)
_NOT_INSTRUCTIONS = ("region", "tensor", "parameter", "symbol")
_COLLECTIVES = {
    "comm_alltoall": "all_to_all",
    "comm_allgather": "all_gather",
    "comm_allreduce": "all_reduce",
    "comm_reduce_scatter": "reduce_scatter",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanText:
    """Counts over the whole program. ``collectives`` maps the operation to its number."""

    num_ranks: int
    collectives: dict[str, int]
    num_fused_attentions: int
    num_instructions: int


def read_plan_text(plan: bytes) -> PlanText | None:
    """Count a plan's instructions; None when the plan has no program text of the known version."""
    start = plan.find(_PROGRAM_START)
    if start < 0:
        return None
    ends = [end for mark in _PROGRAM_ENDS if (end := plan.find(mark, start + 1)) > 0]
    text = plan[start : min(ends, default=len(plan))].decode("latin1")
    names = [(kind, name) for kind, name in _INSTRUCTION.findall(text) if kind not in _NOT_INSTRUCTIONS]
    kinds = Counter(kind for kind, _ in names)
    world = re.search(r"world_size = (\d+)", text)
    return PlanText(
        num_ranks=int(world.group(1)) if world else 1,
        collectives={_COLLECTIVES.get(k, k): n for k, n in kinds.items() if k.startswith("comm_")},
        num_fused_attentions=sum("mha" in name for _, name in names),
        num_instructions=len(names),
    )
