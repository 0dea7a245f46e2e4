"""The interfaces of engine and sampler: configured choice, inputs of an "auto" choice, compiled denoiser."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from engines.core.estimates import StepEstimates
from engines.core.model import Branch
from engines.core.storage import HostLock

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineChoice:
    """An engine's configuration and where it will run, before there is a model or a rank."""

    strategy: str = "auto"
    """"auto", or an argument of ``ParallelSpec.of``."""
    precision: str = "auto"
    """Precision of the linears, in the engine's own terms."""
    attention: str = "auto"
    """Precision of attention (``engines.core.spec.ATTENTIONS``)."""
    attentions: tuple[str, ...] = ()
    """Further precisions of attention that requests may name."""
    options: object | None = None
    """The engine's own options (None: its defaults)."""
    num_ranks: int = 1
    """Ranks of the gang."""
    gpus_per_rank: float = 0.0
    """0 on the CPU; below 1, ranks share a GPU."""
    dtype: str = "auto"
    """The model's configured dtype; "auto" is resolved when it is loaded."""
    merges: bool = False
    """True if additions (``core.additions``) are merged into the weights at load."""
    switches: bool = False
    """True if additions change at run time."""
    eager_only: str = ""
    """Why the model cannot be exported: a clause that begins with its class. Empty if it can, or if unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choosing:
    """Inputs of an "auto" choice."""

    typical_step: Callable[[], tuple[Branch, ...]]
    """Returns the branches of a typical step (empty: not known before a request)."""
    folder: Path
    """Folder of the decisions."""
    name: str
    """Prefix of the decisions' files."""
    facts: Mapping[str, str]
    """Facts that a decision depends on: model, software and configuration, as texts."""
    every_team: bool = False
    """True if teams of all sizes will work, not the whole gang alone."""
    lock: HostLock | None = None
    """The lock of the host's GPUs, held while steps are timed."""


Forwards = Literal["compiled", "eager"]
"""Form of the forwards of an engine's modules."""


class Engine(Protocol):
    """A compiled denoiser. Every rank of ``ranks`` makes the same call at the same time."""

    def predict(self, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Return one prediction (noise or velocity, whole, on the device) per branch, equal on all of ``ranks``.

        ``ranks`` are sorted global ranks of the gang, the caller among them; their number is the team's size.
        ``ValueError`` and ``JobFailedError`` mean that all of ``ranks`` failed alike, before any exchange.
        Any other error leaves their communicator in an unknown state.
        """
        ...

    def warm_up(self, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> None:
        """Compile and capture for these shapes before the first step. Called like ``predict``."""
        ...

    @property
    def was_warm(self) -> bool:
        """True if the last ``predict`` needed no compilation or graph capture."""
        ...

    @property
    def team_sizes(self) -> tuple[int, ...]:
        """The supported team sizes, in ascending order."""
        ...

    @property
    def estimates(self) -> StepEstimates | None:
        """Estimated step times; None if unknown."""
        ...

    def close(self) -> None:
        """Release graphs and contexts. The communicator must still be alive."""
        ...


class EagerEngine:
    """An ``Engine`` for one rank but for ``predict``: nothing to compile, to estimate or to release."""

    was_warm: bool = True
    team_sizes: tuple[int, ...] = (1,)
    estimates: StepEstimates | None = None

    def warm_up(self, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankContext:
    """A rank's place in its gang, and its device.

    There is a context only once ``torch.distributed`` is initialised, unless the rank is alone.
    """

    rank: int
    """Its number, from 0."""
    num_ranks: int
    """Ranks of the gang."""
    device: str
    """"cuda:0", or "cpu"."""
    num_hosts: int = 1
    """Each host has the same number of ranks, in host order."""


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


class AdditionLoader(Protocol):
    """Loads additions to the weights (``core.additions``) that come at run time. Called on threads beside the steps."""

    def for_request(self, request: Any) -> object:
        """Load the additions of a request. They stay loaded as long as the result lives. ValueError if one cannot."""
        ...

    def load(self, source: Any) -> int:
        """Load one addition, and return its size in bytes. ValueError if it does not suit the model."""
        ...

    def remove(self, source: Any) -> None:
        """Release an addition once no request needs it."""
        ...


class JobFailedError(RuntimeError):
    """The job's own computation failed, and would on another gang. The message says how; the ranks are intact."""
