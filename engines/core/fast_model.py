"""The fast path of a model: its step as a hand-ordered sequence, cut where an engine gains time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from engines.core.additions import Writers

if TYPE_CHECKING:
    from torch import Tensor, nn

Precision = Literal["native", "fp8"]
"""The dtype that the GEMMs of a hand-ordered step compute in."""

KEPT = "kept"
"""Key in ``hoisted`` of the mask for a padded prompt: True for attended keys, ``(tokens,)`` of all streams, in the
order of a step's rows."""

StepTensors: TypeAlias = Mapping[str, "Tensor"]
"""All inputs of one step, by name. A captured step has buffers of these shapes."""


class FastModel(Protocol):
    """One transformer's step, for one team's exchange."""

    def hoisted(self, arguments: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return this rank's share of the inputs that are constant over a job: embedded text, rotary tables."""
        ...

    def step(self, latents: Tensor, hoisted: StepTensors) -> Tensor:
        """Return this rank's tokens of the prediction from its tokens of the latents."""
        ...


class FastWeights(Protocol):
    """A transformer's weights arranged for the fast path, once per module; teams share them."""

    latents_stream: str
    """The stream whose tokens a step reads and predicts."""

    def lengths(self, arguments: Mapping[str, Any]) -> Mapping[str, int] | None:
        """Return the tokens of each stream, in the order of a step's rows; None: the shard plan's."""
        ...

    def filled_lengths(self, arguments: Mapping[str, Any]) -> Mapping[str, int] | None:
        """Return the lengths with the prompt padded to a length shared with others; None: padding is impossible."""
        ...

    def tokens(self, latents: Tensor) -> Tensor:
        """Return ``tokens_BSD`` of whole latents, padding of the stream included."""
        ...

    def prediction(self, tokens_BSD: Tensor, latents: Tensor) -> Tensor:
        """Return the prediction in the form of ``latents`` from its tokens."""
        ...

    def model(self, parts: Any) -> FastModel:
        """Return the model for one team. ``parts`` is an ``engines.fast.interface.StepParts``."""
        ...

    def scheduled(self, inputs: StepTensors, timesteps_SB: Tensor) -> dict[str, Tensor]:
        """Return what depends on the timestep but not on the latents (modulation), for S steps: stacked, step first.

        ``inputs`` are whole; their timestep is ignored. ``timesteps_SB`` may have one column for all entries.
        """
        ...

    def writers(self) -> Writers:
        """Return the functions to call when a parameter of the module changes; parameters used as views need none."""
        ...


ArrangeWeights: TypeAlias = Callable[["nn.Module", Precision], FastWeights]
