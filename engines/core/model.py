"""The engine's view of a model family: single-device modules and the data to split them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from engines.core.additions import Addition, Mix
from engines.core.fast_model import ArrangeWeights
from engines.core.kernel import Kernel
from engines.core.shard_plan import ShardPlan

if TYPE_CHECKING:  # processes that only pass these records on run without torch
    import torch
    from torch import Tensor, nn


LATENTS, TIMESTEP = "hidden_states", "timestep"
"""Default argument names of the per-step inputs in diffusers transformers."""

ModelInputs: TypeAlias = Mapping[str, "Tensor"]
"""Keyword arguments of the transformer's ``forward``, whole (unsplit), batch first where they have a batch."""

Arguments: TypeAlias = Mapping[str, Any]
"""All keyword arguments of ``forward``: the inputs, and constants that are no tensors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The timesteps of all steps of a job (one value for all entries), and the index of the current step.

    An engine may compute once what depends on these and on inputs that stay the same tensors from step to step.
    ``find()`` returns the timesteps, the same tensor in all steps of a job.
    """

    find: Callable[[], Tensor]
    step: int

    @classmethod
    def of(cls, timesteps_S: Tensor, step: int) -> Schedule:
        return cls(find=lambda: timesteps_S, step=step)

    @property
    def timesteps_S(self) -> Tensor:
        return self.find()


@dataclass(frozen=True, kw_only=True, slots=True)
class Branch:
    """One forward of one step. A step has one branch, with true guidance two (prompt, negative prompt), in some models
    more."""

    inputs: ModelInputs
    module: str = "transformer"
    """The transformer's name in ``DenoiserModel.modules`` (Wan 2.2 changes between two during a job)."""
    schedule: Schedule | None = None
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that are no tensors (grid sizes, switches); other values are another computation."""
    additions: Mix = ()
    """The model's additions to apply to the weights."""

    @property
    def arguments(self) -> Arguments:
        return {**self.constants, **self.inputs} if self.constants else self.inputs

    @property
    def batch(self) -> int:
        """The batch size: first dim of the latents; 1 if the latents' argument has a model-specific name."""
        return self.inputs[LATENTS].shape[0] if LATENTS in self.inputs else 1


class WeightSource(Protocol):
    """Where a rank reads its share of weights: see ``parallel.weight_files``."""

    @property
    def device(self) -> torch.device: ...

    def fill(
        self, name: str, module: nn.Module, slices: Mapping[str, Any], leave_out: Collection[nn.Module] = ()
    ) -> None:
        """Load the weights of the module ``name``, except for the modules in ``leave_out``."""
        ...


def dtype_of(module: nn.Module) -> torch.dtype:
    """Return the dtype of most of the weights. Families keep small tables in float32."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in module.parameters():
        sizes[parameter.dtype] += parameter.numel()
    return sizes.most_common(1)[0][0]


@dataclass(frozen=True, kw_only=True, slots=True)
class DenoiserModel:
    """A family's transformers with the data to split, compile or export them."""

    modules: Mapping[str, nn.Module]
    """Transformers by name; with ``weights``, their parameters are on "meta"."""
    plan: ShardPlan
    num_heads: int
    """Query heads of self-attention; ``head_dim`` likewise."""
    head_dim: int
    stream_lengths: Callable[[Arguments], Mapping[str, int]]
    """``stream_lengths(arguments)`` returns the number of tokens by stream."""
    set_kernel: Callable[[nn.Module, Kernel], None]
    """``set_kernel(module, kernel)`` makes the module's self-attention call ``kernel``."""
    forward: Callable[[nn.Module, Arguments], Tensor]
    """``forward(module, arguments)`` returns the prediction."""
    probe: Callable[[], tuple[Branch, ...]]
    """Returns a small, seeded step, the same on every rank, for a gang's self-check (empty: none)."""
    hoisted: Callable[[nn.Module, Arguments], ModelInputs] | None = None
    """Computes extra inputs of ``forward`` once a job, from all but latents and timestep; the module is whole."""
    reads_values: bool = False
    """True if ``forward`` without ``hoisted`` inputs reads tensor values, which rules out capture."""
    fast: ArrangeWeights | None = None
    """Arranges a module's weights for a hand-ordered step equal to its ``forward``."""
    typical_lengths: Mapping[str, int] | None = None
    """Expected tokens by stream, if known; an "auto" strategy is chosen for them."""
    weights: WeightSource | None = None
    """Files from which every rank reads its share of the weights."""
    additions: Mapping[str, Addition] = field(default_factory=dict)
    """Additions that branches may use, by name."""
    latents: str = LATENTS
    """Names of the per-step inputs, here and in ``timestep``."""
    timestep: str = TIMESTEP

    @property
    def class_name(self) -> str:
        """The class name of its transformers, comma-separated if they differ."""
        return ", ".join(dict.fromkeys(type(module).__name__ for module in self.modules.values()))

    def check_planned(self, num_ranks: int) -> None:
        """Raise ValueError for several ranks if the model has no shard plan."""
        if num_ranks > 1 and not self.plan.shards and not self.plan.linears:
            raise ValueError(
                f"there is no plan to divide {self.class_name} over {num_ranks} ranks: give it gangs of one rank "
                "(num_ranks: 1), and more of them (num_replicas) for more pictures at once"
            )

    @property
    def device(self) -> torch.device:
        """The device that the model computes on."""
        if self.weights is not None:
            return self.weights.device
        return next(next(iter(self.modules.values())).parameters()).device
