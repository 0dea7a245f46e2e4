"""What an engine gets from a model family: single-device modules and the data to split them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from engines.core.additions import Addition, Mix
from engines.core.fast_model import ArrangeWeights
from engines.core.kernel import Kernel
from engines.core.shard_plan import ShardPlan

if TYPE_CHECKING:  # processes that only pass these records on do without torch
    import torch
    from torch import Tensor, nn


LATENTS, TIMESTEP = "hidden_states", "timestep"
"""How most of diffusers' transformers call the inputs that change with every step."""

ModelInputs: TypeAlias = Mapping[str, "Tensor"]
"""Keyword arguments of the transformer's ``forward``, whole (unsplit), batch first where they have a batch."""

Arguments: TypeAlias = Mapping[str, Any]
"""All keyword arguments of ``forward``: the inputs, and constants that are no tensors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """What is known of a job's other steps: every step's ``timestep`` (one value for all entries), and which is now.

    An engine may compute once what depends on these and on inputs that stay the same tensors from step to step.
    ``find()`` gives the timesteps when they are asked for, in all steps of a job the same tensor.
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
    """One forward of one step. Without true guidance a step has one branch; with it two: prompt, then negative prompt;
    of some models more.

    ``module`` names the transformer in ``DenoiserModel.modules`` (Wan 2.2 changes between two during a job).
    ``constants`` are arguments that are no tensors (sizes of grids, switches): with others it is another computation.
    ``additions`` are what its weights are to have added, of those that the model knows.
    """

    inputs: ModelInputs
    module: str = "transformer"
    schedule: Schedule | None = None
    constants: Mapping[str, Any] = field(default_factory=dict)
    additions: Mix = ()

    @property
    def arguments(self) -> Arguments:
        return {**self.constants, **self.inputs} if self.constants else self.inputs

    @property
    def batch(self) -> int:
        """Of its latents, whose first dim it is; those with a name of a model's own come one by one."""
        return self.inputs[LATENTS].shape[0] if LATENTS in self.inputs else 1


class WeightSource(Protocol):
    """Where a rank reads its share of weights that it does not hold whole: see ``parallel.weight_files``."""

    @property
    def device(self) -> torch.device: ...

    def fill(
        self, name: str, module: nn.Module, slices: Mapping[str, Any], leave_out: Collection[nn.Module] = ()
    ) -> None:
        """Give the module of that name its weights, but none to the modules in ``leave_out``."""
        ...


def dtype_of(module: nn.Module) -> torch.dtype:
    """What ``module`` computes in: the dtype of most of its weights. Families keep small tables in float32."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in module.parameters():
        sizes[parameter.dtype] += parameter.numel()
    return sizes.most_common(1)[0][0]


@dataclass(frozen=True, kw_only=True, slots=True)
class DenoiserModel:
    """A family's transformer(s) with what an engine must know to split, compile or export them.

    ``stream_lengths(arguments)`` gives the number of tokens per stream name; ``set_kernel(module, kernel)`` makes the
    module's self-attention call ``kernel``; a module called with ``forward(module, arguments)`` returns the prediction.
    ``hoisted(module, arguments)`` makes further inputs that ``forward`` may be given, from those that no step of a job
    changes (all but the latents and the timestep); the module is whole (None: there is nothing to gain). If it
    ``reads_values``, ``forward`` looks at values of tensors where it is not given these, and cannot be captured then.
    ``head_dim`` and ``num_heads`` are those of queries in self-attention. ``probe()`` makes the branches of one small,
    seeded, known step (the same on every rank), for the self-check of a gang at its start (none: there is no such
    step). ``fast`` arranges a module's weights for a hand-ordered step that equals its ``forward`` (None: there is
    none). ``typical_lengths`` are the tokens per stream of the steps to come, if that is known: an "auto" strategy is
    chosen for them. With ``weights``, the modules' parameters are on "meta", and every rank reads what it needs of them
    from these files. ``additions`` are what branches may have added to the weights, by name. ``latents`` and
    ``timestep`` are the names of the inputs that change with every step.
    """

    modules: Mapping[str, nn.Module]
    plan: ShardPlan
    num_heads: int
    head_dim: int
    stream_lengths: Callable[[Arguments], Mapping[str, int]]
    set_kernel: Callable[[nn.Module, Kernel], None]
    forward: Callable[[nn.Module, Arguments], Tensor]
    probe: Callable[[], tuple[Branch, ...]]
    hoisted: Callable[[nn.Module, Arguments], ModelInputs] | None = None
    reads_values: bool = False
    fast: ArrangeWeights | None = None
    typical_lengths: Mapping[str, int] | None = None
    weights: WeightSource | None = None
    additions: Mapping[str, Addition] = field(default_factory=dict)
    latents: str = LATENTS
    timestep: str = TIMESTEP

    @property
    def class_name(self) -> str:
        """The name of the class of its transformers, of which there may be several."""
        return ", ".join(dict.fromkeys(type(module).__name__ for module in self.modules.values()))

    def check_planned(self, num_ranks: int) -> None:
        """ValueError for several ranks, and a model of which nobody has said how it is divided."""
        if num_ranks > 1 and not self.plan.shards and not self.plan.linears:
            raise ValueError(
                f"there is no plan to divide {self.class_name} over {num_ranks} ranks: give it gangs of one rank "
                "(num_ranks: 1), and more of them (num_replicas) for more pictures at once"
            )

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        if self.weights is not None:
            return self.weights.device
        return next(next(iter(self.modules.values())).parameters()).device
