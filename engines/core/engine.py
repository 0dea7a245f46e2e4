"""The engine interface: a compiled denoiser that answers ``predict`` on one or several ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from engines.core.model import Branch

if TYPE_CHECKING:
    from torch import Tensor


class Engine(Protocol):
    """A denoiser ready to run. Every rank of ``ranks`` makes the same call at the same time."""

    def predict(self, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> tuple[Tensor, ...]:
        """One prediction (noise or velocity, whole, on the device) per branch, equal on all of ``ranks``.

        ``ranks`` are sorted global ranks of the gang and contain the caller; their number is the size of the team.
        """
        ...

    def warm_up(self, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> None:
        """Do what the first steps of these shapes would have to do: compile, capture. Called as ``predict`` is."""
        ...

    @property
    def was_warm(self) -> bool:
        """Whether the last prediction found all ready for its shapes, be it by ``warm_up`` or by earlier steps."""
        ...

    @property
    def team_sizes(self) -> tuple[int, ...]:
        """How many ranks a prediction may have, in ascending order."""
        ...

    def close(self) -> None:
        """Release graphs and contexts. The communicator must still be alive."""
        ...
