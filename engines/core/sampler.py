"""The sampler interface: a family's solver, seen from a rank. The engine predicts, the sampler steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from engines.core.model import Branch

if TYPE_CHECKING:
    from torch import Tensor

State = TypeVar("State")


class Sampler(Protocol[State]):
    """One job's denoising from noise to latents. States are immutable: each step returns a new one.

    All ranks of a job compute equal states from the same seed, without any exchange.
    """

    def begin(self, request: Any, conditioning: Any) -> State:
        """Draw the noise, set the timesteps. ``request`` and ``conditioning`` are the family's own records."""
        ...

    def num_steps(self, state: State) -> int: ...

    def branches(self, state: State) -> tuple[Branch, ...]:
        """Return the forwards of the next step: one, two with true guidance, none if cached predictions suffice."""
        ...

    def advance(self, state: State, predictions: tuple[Tensor, ...]) -> State:
        """Do one solver step, given one prediction per branch, and return the new state."""
        ...

    def latents(self, state: State) -> Any:
        """Return the finished latents and the decoder's other inputs (tensors on the CPU).

        Raises ``ValueError`` or ``JobFailedError`` if they are not finite.
        """
        ...

    def preview(self, state: State) -> Any:
        """Return an estimate of the finished latents of a running job, in the form of ``latents``."""
        ...
