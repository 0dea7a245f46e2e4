"""What a step needs on each rank at the very least, so that what certainly does not fit is refused and not tried.

To run out of memory inside a step breaks a gang, and the next one after it.
"""

from __future__ import annotations

from dataclasses import dataclass

from engines.core.spec import ParallelSpec

CERTAIN_COPIES = 5
"""Hidden states that no block does without at once: the residual, queries, keys, values and what attention makes of
them; or the residual and what an MLP widens it to. ``step_cost.LIVE_COPIES`` are those of a usual engine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryFloor:
    """``available_bytes`` of one rank, the smallest of the gang's; ``weight_bytes`` of the whole model, and
    ``token_bytes`` of a hidden state's row."""

    available_bytes: int
    weight_bytes: int
    token_bytes: int

    def needed_bytes(self, num_tokens: int, spec: ParallelSpec) -> int:
        """The weights, and the activations of one rank's tokens. Never more than it is."""
        weights = self.weight_bytes / (spec.tensor * spec.pipeline)
        tokens = -(-num_tokens // spec.context)
        return int(weights + CERTAIN_COPIES * tokens * self.token_bytes / spec.tensor)

    def check(self, num_tokens: int, spec: ParallelSpec) -> None:
        """``ValueError`` for a step that cannot fit, with what it needs and what there is."""
        needed = self.needed_bytes(num_tokens, spec)
        if needed > self.available_bytes:
            held = self.needed_bytes(0, spec)
            raise ValueError(
                f"a step of {num_tokens} tokens needs {needed / 2**30:.1f} GiB on each rank at least, "
                f"{held / 2**30:.1f} of them for weights, and a rank has {self.available_bytes / 2**30:.1f} GiB: ask "
                "for a smaller size or fewer frames, or serve the model with more ranks that share a step"
            )
