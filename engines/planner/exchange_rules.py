"""How the ranks of a team exchange heads, where there is more than one way."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeRules:
    """``peer_memory``: ranks write into each other's memory where that works, and call NCCL elsewhere alone.
    ``side_streams``: hand-ordered steps over several ranks compute beside their exchanges. ``parts_from_tokens``: all
    other steps of so many tokens exchange heads in parts; None: of as many as is usual.
    """

    peer_memory: bool = True
    side_streams: bool = True
    parts_from_tokens: int | None = None

    def __post_init__(self) -> None:
        are_bools = isinstance(self.peer_memory, bool) and isinstance(self.side_streams, bool)
        if not are_bools or type(self.parts_from_tokens) not in (int, type(None)):
            raise ValueError(f"{self} are no rules: two of true or false, and a whole number or null")

    def describe(self) -> str:
        """What is not usual."""
        unusual = [] if self.peer_memory else ["without peer memory"]
        unusual += [] if self.side_streams else ["without side streams"]
        unusual += [] if self.parts_from_tokens is None else [f"in parts from {self.parts_from_tokens} tokens"]
        return ", ".join(unusual) or "as usual"
