"""The engine's view of a model family: single-device modules, the data to split them, their fast path and additions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from engines.core.attention import Kernel
from engines.core.shard_plan import ShardPlan

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


Mix: TypeAlias = tuple[tuple[str, float], ...]
"""Names of additions, each with its amount."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LowRank:
    """A product ``scale * up_NR @ down_RK`` (Hu et al. 2021, arXiv:2106.09685), in the shape of its parameter."""

    up_NR: Tensor
    """(outputs, rank). A parameter without two dims counts as a matrix of its first dim."""
    down_RK: Tensor
    """(rank, inputs): all other dims of the parameter flat; 1 for a bias."""
    scale: float = 1.0
    """The adapter's own, such as alpha / rank."""


LowRanks: TypeAlias = Mapping[str, LowRank]
"""The additions to one module, by parameter name."""

Addition: TypeAlias = Mapping[str, LowRanks]
"""The additions to a model's modules, by module name."""

WriteWeight: TypeAlias = Callable[["Tensor"], object]
"""Takes the new value of a parameter, in its shape, and first rounds it to the parameter's dtype."""

Writers: TypeAlias = Mapping["nn.Parameter", tuple[WriteWeight, ...]]
"""Functions that update copies of a parameter in another form, such as quantised; the parameter stays unchanged."""


def normal_mix(mix: Mix) -> Mix:
    """Return ``mix`` sorted by name and without zero amounts, so that equal mixes compare equal."""
    return tuple(sorted((name, amount) for name, amount in mix if amount))


Precision = Literal["native", "fp8"]
"""The dtype that the GEMMs of a hand-ordered step compute in."""

KEPT = "kept"
"""Key in ``hoisted`` of the mask for a padded prompt: True for attended keys.

Its shape is ``(tokens,)`` of all streams, in the order of a step's rows."""

StepTensors: TypeAlias = Mapping[str, "Tensor"]
"""All inputs of one step, by name. A captured step has buffers of these shapes."""

MAX_CAPTURED_BYTES = 2**31
"""Inputs of a step above which it is not captured: it takes seconds, and each shape's graph would hold a copy."""

MAX_CAPTURED_FLOPS = 1.5e15
"""FLOP of a module's forward on each of its ranks (``rough_flops``) above which it is not captured: 2 s on an H200.

Kernels of milliseconds hide their launches, so a graph gains nothing: SGLang's step of MiniMax-H3 on two H200s takes
2853.0 ms captured, 2849.6 ms as it ships. A capture costs two more runs for every shape, and memory. The limit depends
on no device and on no measured time: all ranks of a team, and all starts, must decide alike."""

MIN_HOISTED_BYTES, HOISTED_SHARE = 2**31, 16
"""Least limit of what jobs in progress keep, and the share of a rank's memory that it is elsewhere."""


def max_hoisted_bytes(memory_bytes: int) -> int:
    """Return the most that jobs in progress keep of what they compute once, on a rank with ``memory_bytes``."""
    return max(MIN_HOISTED_BYTES, memory_bytes // HOISTED_SHARE)


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
    step_inputs: tuple[str, ...]
    """Inputs that change with every step beside latents and timestep; only ``scheduled`` reads them."""

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

        ``inputs`` are whole; their timestep is ignored, and with several steps their ``step_inputs``, which follow from
        the timesteps. ``timesteps_SB`` may have one column for all entries.
        """
        ...

    def writers(self) -> Writers:
        """Return the functions to call when a parameter of the module changes; parameters used as views need none."""
        ...

    def release(self, unless: Collection[nn.Parameter]) -> None:
        """Drop the module's parameters that have a quantised copy here, ``unless`` they change later.

        The module computes with the quantised values afterwards.
        """
        ...


ArrangeWeights: TypeAlias = Callable[["nn.Module", Precision], FastWeights]


LATENTS, TIMESTEP = "hidden_states", "timestep"
"""Default argument names of the per-step inputs in diffusers transformers."""

ModelInputs: TypeAlias = Mapping[str, "Tensor"]
"""Keyword arguments of the transformer's ``forward``, whole (unsplit), batch first where they have a batch."""

Arguments: TypeAlias = Mapping[str, Any]
"""All keyword arguments of ``forward``: the inputs, and constants that are no tensors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The timesteps of a job, and where it is in them. An engine may compute values of these once per job."""

    find: Callable[[], Tensor]
    """Returns the timesteps of all steps, one value for all entries: the same tensor in all steps of a job."""
    step: int
    """Index of the current step, from 0."""

    @property
    def timesteps_S(self) -> Tensor:
        return self.find()


@dataclass(frozen=True, kw_only=True, slots=True)
class Branch:
    """One forward of one step. With true guidance, a step has two branches or more (prompt, negative prompt)."""

    inputs: ModelInputs
    """Tensors by argument of the forward, latents and timestep among them."""
    module: str = "transformer"
    """The transformer's name in ``DenoiserModel.modules`` (Wan 2.2 changes between two during a job)."""
    schedule: Schedule | None = None
    """Timesteps of the job; None: nothing is computed ahead of a step."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that are no tensors (grid sizes, switches); other values are another computation."""
    additions: Mix = ()
    """The model's additions to apply to the weights."""
    attention: str = ""
    """Precision of attention (``engines.core.spec.ATTENTIONS``); empty: the engine's own."""

    @property
    def arguments(self) -> Arguments:
        return {**self.constants, **self.inputs} if self.constants else self.inputs

    @property
    def batch(self) -> int:
        """The batch size: first dim of the latents; 1 if the latents' argument has a model-specific name."""
        return self.inputs[LATENTS].shape[0] if LATENTS in self.inputs else 1


def with_attention(branches: tuple[Branch, ...], attention: str) -> tuple[Branch, ...]:
    """Return ``branches`` with their attention in this precision."""
    return tuple(replace(branch, attention=attention) for branch in branches)


class WeightSource(Protocol):
    """Source of a rank's share of the weights: see ``parallel.weight_files``."""

    @property
    def device(self) -> torch.device: ...

    def fill(
        self,
        name: str,
        module: nn.Module,
        slices: Mapping[str, Any],
        leave_out: Collection[nn.Module] = (),
        on_host: Collection[str] = (),
    ) -> None:
        """Load the weights of the module ``name``, except for the modules in ``leave_out``.

        The parameters ``on_host`` are not moved to the device.
        """
        ...


def dtype_of(module: nn.Module) -> torch.dtype:
    """Return the dtype of most of the weights. Families keep small tables in float32."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in module.parameters():
        sizes[parameter.dtype] += parameter.numel()
    return sizes.most_common(1)[0][0]


def device_of(module: nn.Module) -> torch.device:
    """Return the device that the module computes on. Weights may lie on the host until they are quantised."""
    devices = list(dict.fromkeys(parameter.device for parameter in module.parameters()))
    return next((device for device in devices if device.type != "cpu"), devices[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class DenoiserModel:
    """A family's transformers with the data to split, compile or export them."""

    modules: Mapping[str, nn.Module]
    """Transformers by name; with ``weights``, their parameters are on "meta"."""
    plan: ShardPlan
    """How ranks divide a transformer."""
    num_heads: int
    """Query heads of self-attention."""
    head_dim: int
    """Features of one of them."""
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
    hoisted_inputs: tuple[str, ...] = ()
    """Inputs that ``hoisted`` reads: branches that share them share what it computes. Empty: all, and the constants."""
    hoisted_features: Mapping[str, int] = field(default_factory=dict)
    """Numbers that ``hoisted`` leaves on every rank for each token of a stream, by stream."""
    hoisted_numbers: int = 0
    """Numbers that ``hoisted`` leaves for the longest prompt, if it leaves none for tokens of a stream."""
    num_hoisted: int = 2
    """Results of ``hoisted`` that a job with guidance needs from each module."""
    hoists_by_blocks: bool = False
    """True if ``hoisted`` calls whole blocks, or holds the weights of those inside which it calls layers
    (``offload.on_device``): then it runs once a job with offloaded blocks too."""
    reads_values: bool = False
    """True if ``forward`` without ``hoisted`` inputs reads tensor values, which rules out capture."""
    dynamic_shapes: bool = False
    """True if blocks are compiled once for all numbers of tokens, as prompts differ in length."""
    fast: ArrangeWeights | None = None
    """Arranges a module's weights for a hand-ordered step equal to its ``forward``."""
    typical_lengths: Mapping[str, int] | None = None
    """Expected tokens by stream, if known; an "auto" strategy is chosen for them."""
    weights: WeightSource | None = None
    """Files from which every rank reads its share of the weights."""
    additions: Mapping[str, Addition] = field(default_factory=dict)
    """Additions that branches may use, by name."""
    additions_change: bool = False
    """True if ``additions`` come and go after the start."""
    unchanged: tuple[str, ...] = ()
    """Submodules whose weights no addition changes that comes after the start."""
    latents: str = LATENTS
    """Name of the input with the latents, which change with every step."""
    timestep: str = TIMESTEP
    """Name of the input with the timestep."""

    @property
    def switches(self) -> bool:
        """True if additions to the weights differ from branch to branch."""
        return self.additions_change or bool(self.additions)

    @property
    def class_name(self) -> str:
        """The class name of its transformers, comma-separated if they differ."""
        return ", ".join(dict.fromkeys(type(module).__name__ for module in self.modules.values()))

    def check_planned(self, num_ranks: int) -> None:
        """Raise ValueError for several ranks if the model has no shard plan."""
        if num_ranks > 1 and not self.plan.shards and not self.plan.linears:
            raise ValueError(
                f"there is no plan to divide {self.class_name} over {num_ranks} ranks: give it gangs of one rank "
                "(num_ranks: 1), and more of them (num_replicas) for more pictures in parallel"
            )

    @property
    def device(self) -> torch.device:
        """The device that the model computes on."""
        if self.weights is not None:
            return self.weights.device
        return device_of(next(iter(self.modules.values())))
