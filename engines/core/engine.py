"""The engine interface: what is asked of an engine, what its choices are for, and what a compiled denoiser answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from engines.core.estimates import StepEstimates
from engines.core.model import Branch
from engines.core.storage.files import HostLock

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineChoice:
    """What is asked of an engine and where it will run, known before there is a model or a rank.

    ``strategy`` is "auto" or what ``ParallelSpec.of`` takes; ``precision`` is that of the linears, in the engine's own
    words; ``options`` are the engine's own as well (None: their defaults). ``dtype`` is the model's as a configuration
    names it: "auto" is decided where it is loaded. ``merges``: something is added to its weights as they are loaded;
    ``switches``: or while it runs (see ``core.additions``). ``eager_only`` says of a model whose forward becomes no
    graph outside torch which it is, and why: a clause that begins with its class. Empty where it does, or nobody knows.
    """

    strategy: str = "auto"
    precision: str = "auto"
    options: object | None = None
    num_ranks: int = 1
    gpus_per_rank: float = 0.0
    dtype: str = "auto"
    merges: bool = False
    switches: bool = False
    eager_only: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choosing:
    """``typical_step()`` gives the branches that most steps are like (none: not known before a request). Decisions are
    kept in ``folder``, under ``name``, for these ``facts`` about the model and its software. ``every_team``: teams of
    all sizes will work, not the whole gang alone. Steps are timed under the ``lock`` of the host's GPUs.
    """

    typical_step: Callable[[], tuple[Branch, ...]]
    folder: Path
    name: str
    facts: Mapping[str, str]
    every_team: bool = False
    lock: HostLock | None = None


class Engine(Protocol):
    """A denoiser ready to run. Every rank of ``ranks`` makes the same call at the same time."""

    def predict(self, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> tuple[Tensor, ...]:
        """One prediction (noise or velocity, whole, on the device) per branch, equal on all of ``ranks``.

        ``ranks`` are sorted global ranks of the gang and contain the caller; their number is the size of the team.
        ``ValueError`` and ``JobFailedError`` say that all of ``ranks`` failed alike, before they exchanged anything.
        Any other error leaves their communicator in an unknown state.
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

    @property
    def estimates(self) -> StepEstimates | None:
        """What steps are estimated to take; None where that is not known."""
        ...

    def close(self) -> None:
        """Release graphs and contexts. The communicator must still be alive."""
        ...
