"""What a model may give beside its module: the same step as a hand-ordered sequence, cut where an engine gains time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from engines.core.additions import Writers

if TYPE_CHECKING:
    from torch import Tensor, nn

Precision = Literal["native", "fp8"]
"""What the GEMMs of a hand-ordered step compute in."""

KEPT = "kept"
"""What ``hoisted`` says of the keys where a prompt is filled up: True for those that are attended, ``(tokens,)`` of all
streams, in the order of a step's rows."""

StepTensors: TypeAlias = Mapping[str, "Tensor"]
"""Everything that one step reads, by name. A captured step keeps buffers of these shapes."""


class FastModel(Protocol):
    """One transformer's step, for one team's exchange."""

    def hoisted(self, arguments: Mapping[str, Any]) -> dict[str, Tensor]:
        """Returns my share of what no step of a job changes, from a whole call: embedded text, rotary tables."""
        ...

    def step(self, latents: Tensor, hoisted: StepTensors) -> Tensor:
        """Returns my tokens of the prediction from my tokens of the latents."""
        ...


class FastWeights(Protocol):
    """A transformer's weights arranged for the fast path, once per module; teams share them.

    ``latents_stream`` is the stream whose tokens a step reads and predicts.
    """

    latents_stream: str

    def lengths(self, arguments: Mapping[str, Any]) -> Mapping[str, int] | None:
        """Returns the tokens of each stream, in the order of a step's rows; None: the shard plan's."""
        ...

    def filled_lengths(self, arguments: Mapping[str, Any]) -> Mapping[str, int] | None:
        """Returns the same where a prompt is filled up to a length that other prompts have too; None: it cannot be."""
        ...

    def tokens(self, latents: Tensor) -> Tensor:
        """Returns ``tokens_BSD`` of whole latents, padding of the stream included."""
        ...

    def prediction(self, tokens_BSD: Tensor, latents: Tensor) -> Tensor:
        """Returns the prediction in the form of ``latents`` from its tokens."""
        ...

    def model(self, parts: Any) -> FastModel:
        """Returns the model for one team. ``parts`` is what the engine brings: ``engines.fast.interface.StepParts``."""
        ...

    def scheduled(self, inputs: StepTensors, timesteps_SB: Tensor) -> dict[str, Tensor]:
        """Returns what depends on the timestep but not on the latents (modulation), for S steps: stacked, step first.

        ``inputs`` are whole; their own timestep is not read. ``timesteps_SB`` may have one column for all entries.
        """
        ...

    def writers(self) -> Writers:
        """Returns what must be told when a parameter of the module gets another value; none that is a view of it."""
        ...


ArrangeWeights: TypeAlias = Callable[["nn.Module", Precision], FastWeights]
