"""The sampler interface: a family's solver, seen from a rank. The engine predicts, the sampler steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from engines.core.model import Branch

if TYPE_CHECKING:
    from torch import Tensor

State = TypeVar("State")


class Sampler(Protocol[State]):
    """One job's way from noise to latents. States are values: each step returns a new one.

    All ranks of a job hold equal states, computed from the same seed, so nothing is exchanged here.
    """

    def begin(self, request: Any, conditioning: Any) -> State:
        """Draw the noise, set the timesteps. ``request`` and ``conditioning`` are the family's own records."""
        ...

    def num_steps(self, state: State) -> int: ...

    def branches(self, state: State) -> tuple[Branch, ...]:
        """The forwards that the next step needs: one, two with true guidance, none where what it has will do."""
        ...

    def advance(self, state: State, predictions: tuple[Tensor, ...]) -> State:
        """One solver step, given one prediction per branch."""
        ...

    def latents(self, state: State) -> Any:
        """The finished latents, with what else the decoder takes (tensors on the CPU).

        ``ValueError`` or ``JobFailedError`` if they are not finite.
        """
        ...

    def preview(self, state: State) -> Any:
        """An estimate of the finished latents from a running job, in the form of ``latents``."""
        ...
