"""Sizes of cards, by the name that they are sold with, and the memory that CUDA reports on them."""

from __future__ import annotations

from dataclasses import dataclass

from engines.planner.machine import MACHINES

GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """A size of memory by its name, and the known machine whose figures count, which has a ``share`` times as much."""

    gb: int
    machine: str
    share: float = 1.0
    hardware: str = ""
    """A part of the name that a sweep has for it."""

    @property
    def gib(self) -> float:
        return self.share * MACHINES[self.machine].memory_bytes / GIB


CARDS = (
    Card(gb=12, machine="rtx-4090", share=12 / 24),
    Card(gb=16, machine="rtx-4090", share=16 / 24),
    Card(gb=24, machine="rtx-4090"),
    Card(gb=48, machine="l40s"),
    Card(gb=80, machine="h100", hardware="H100 80GB"),
    Card(gb=141, machine="h200", hardware="H200"),
)
"""A tenth is left for captured graphs and gaps, as `troupe estimate` leaves it."""


def card_bytes(gb: float) -> int:
    """Return the bytes that CUDA reports on a card of ``gb``; for a size that is not in ``CARDS``, that many GiB."""
    return int(GIB * next((card.gib for card in CARDS if card.gb == gb), gb))
