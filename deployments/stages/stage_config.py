"""Configuration of a model's deployments: text encoder, gang and decoder.

Sections of the gang and the engines are frozen dataclasses of those packages, validated by pydantic.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PlainSerializer,
    PositiveFloat,
    PositiveInt,
    model_validator,
)
from pydantic.dataclasses import dataclass

from engines.core.engine import EngineChoice
from engines.core.spec import Attention, ParallelSpec
from engines.gang.gang_config import GangConfig
from engines.registry import ENGINES, check_engine, find_engine
from engines.tensorrt_engine.rules import TensorRTOptions
from engines.torch_engine.options import TorchOptions
from pipelines.size import Size

DataType = Literal["auto", "float32", "bfloat16", "float16"]
STRICT = ConfigDict(extra="forbid")
"""Forbid unknown keys, in nested dataclasses of other modules too."""


class AutoscalingConfig(BaseModel):
    """Number of replicas (for a Denoiser: gangs), by open requests."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    min_replicas: int = Field(default=1, ge=0)
    max_replicas: PositiveInt = 1
    target_ongoing_requests: PositiveFloat = 2.0
    """Open requests per replica."""
    look_back_period_s: PositiveFloat = 30.0
    """Period over which open requests are averaged."""
    upscale_delay_s: NonNegativeFloat = 30.0
    """Not applied to the first replica."""
    downscale_delay_s: PositiveFloat = 600.0

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max_replicas < max(self.min_replicas, 1):
            raise ValueError(f"max_replicas {self.max_replicas} is below min_replicas {self.min_replicas}")
        return self


class ApiScalingConfig(AutoscalingConfig):
    """Number of replicas of the HTTP API, by open requests: one is open until it is answered, so they are many."""

    target_ongoing_requests: PositiveFloat = 200.0


BY_REQUESTS = ("target_ongoing_requests", "look_back_period_s", "upscale_delay_s", "downscale_delay_s")
BY_WORK = ("idle_s", "priority", "gangs_per_node")


class GangScalingConfig(AutoscalingConfig):
    """Number of gangs, by predicted seconds of work if ``target_wait_s`` is given, else by open requests."""

    target_wait_s: PositiveFloat | None = None
    """Time that a request may wait for others."""
    idle_s: NonNegativeFloat = 300.0
    """Time without work before the last gang ends, if ``min_replicas`` is 0."""
    priority: PositiveFloat = 1.0
    """Models of higher priority get gangs first, within the application's ``max_ranks``."""
    gangs_per_node: PositiveInt = 1
    """Gangs for which a node has room: whole nodes are filled, since they cost the same with fewer."""

    @model_validator(mode="after")
    def _of_one_kind(self) -> Self:
        names = BY_WORK if self.target_wait_s is None else BY_REQUESTS
        fields = type(self).model_fields
        for name in names:
            if getattr(self, name) == fields[name].default:
                continue
            if self.target_wait_s is None:
                raise ValueError(f"{name} has no effect without target_wait_s: give it as well, or leave {name} out")
            raise ValueError(
                f"{name} has no effect beside target_wait_s, which scales by predicted work: leave one of them out"
            )
        return self


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ScaledConfig:
    """A deployment with a number of replicas."""

    num_replicas: PositiveInt = 1
    """Replicas, each with resources of its own."""
    autoscaling: AutoscalingConfig | None = None
    """Replaces ``num_replicas``."""

    def __post_init__(self) -> None:
        if self.autoscaling is not None and self.num_replicas != 1:
            raise ValueError(
                f"num_replicas {self.num_replicas} has no effect beside autoscaling: leave one of them out"
            )

    @property
    def starts_on_demand(self) -> bool:
        """True if it scales to zero replicas."""
        return self.autoscaling is not None and self.autoscaling.min_replicas == 0

    @property
    def max_num_replicas(self) -> int:
        return self.autoscaling.max_replicas if self.autoscaling else self.num_replicas


@dataclass(frozen=True, kw_only=True, config=STRICT)
class StageConfig(ScaledConfig):
    """One text encoder or decoder deployment."""

    num_cpus: float = Field(default=0.2, ge=0)
    """Logical CPUs of Ray."""
    num_gpus: float = Field(default=0.0, ge=0)
    """GPUs of Ray; 0: the CPU is the device, below 1: a share."""
    num_threads: PositiveInt = 1
    """Threads of torch."""
    compile: bool = False
    """Prepare for the inputs of the warm-up (``denoiser.warm_sizes``, a prompt): graphs and fused norms on CUDA, else
    ``torch.compile``. Others run on CUDA with the same bytes, on CPUs as they are written."""
    gives_way: bool = False
    """Lower GPU priority than ranks, under NVIDIA's Multi-Process Service."""

    @property
    def num_devices_used(self) -> int:
        """GPUs of its node that a replica with a GPU share computes on."""
        return 1

    @property
    def sees_all_gpus(self) -> bool:
        return self.num_gpus > 0 and self.num_devices_used > 1


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EncoderConfig(StageConfig):
    """A text encoder."""

    conditionings_mib: int = Field(default=64, ge=0)
    """Size of the cache of conditionings; 0 disables it."""
    takes_turns: bool = False
    """Its weights sleep in host memory while gang and decoder work, and theirs while it encodes, unless all fit."""
    offloads_layers: bool = False
    """Its layers are in host memory. Each is copied to the device for its forward; nothing is prepared."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DecoderConfig(StageConfig):
    """A decoder."""

    memory_gib: PositiveFloat | None = None
    """Limit of GPU memory beside its weights: larger pictures are decoded in rows, with the same pixels."""
    num_devices: PositiveInt = 1
    """GPUs of its node, its own included, for large pictures and clips; pictures that ``compile`` prepared need one."""

    @property
    def num_devices_used(self) -> int:
        return self.num_devices

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory_gib is None else int(self.memory_gib * 2**30)


def _size(written: object) -> Size:
    return written if isinstance(written, Size) else Size.parse(str(written))


WrittenSize = Annotated[Size, BeforeValidator(_size), PlainSerializer(str)]


def _engine(name: str) -> str:
    find_engine(name)
    return name


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DenoiserConfig(ScaledConfig, GangConfig):
    """The gangs of a model, and the engine on their ranks. ``torch`` and ``tensorrt`` are sections of one engine."""

    autoscaling: GangScalingConfig | None = None
    """Replaces ``num_replicas``."""
    engine: Annotated[str, AfterValidator(_engine)] = "torch"
    """"torch" or "tensorrt"."""
    strategy: str = "auto"
    """"auto", or how ranks divide a step (``ParallelSpec.of``)."""
    precision: str = "auto"
    """Precision of the linears, in the engine's own terms; "auto": as the engine decides."""
    attention: str = "auto"
    """Precision of attention: ``auto`` (the model's dtype) or ``fp8``."""
    load: Literal["auto", "whole", "sliced"] = "auto"
    """Weights of each rank.

    ``whole``: all of them, for teams of any size. ``sliced``: the rank's share, for a model that fits no single device.
    It needs the engine torch and a strategy that divides weights. ``auto``: ``sliced`` for such a strategy, or if the
    strategy is "auto" and whole weights would not fit.
    """
    reading: Literal["auto", "together", "each"] = "auto"
    """Reading of whole weights.

    ``together``: each rank reads a share of the files, and ranks of one host exchange the rest. ``each``: every rank
    reads everything. ``auto``: ``together`` on GPUs, since ranks on CPUs use the mapped files themselves.
    """
    warm_sizes: tuple[WrittenSize, ...] = ()
    """Sizes that are compiled and captured at start; on TensorRT one engine file takes all sizes between them."""
    compile: bool = False
    """Compile the denoiser of a whole pipeline at start, for ``warm_sizes`` or the default size."""
    torch: TorchOptions | None = None
    """Options of the engine torch."""
    tensorrt: TensorRTOptions | None = None
    """Options of the engine tensorrt."""

    def __post_init__(self) -> None:
        ScaledConfig.__post_init__(self)
        GangConfig.__post_init__(self)
        for name in ENGINES:
            if name != self.engine and getattr(self, name) is not None:
                raise ValueError(
                    f"the section {name} is for engine: {name} alone, and the engine is {self.engine}: remove the one "
                    "or change the other"
                )
        self.check_engine("auto")
        if self.reading == "together" and (self.num_ranks == self.num_nodes or self.load == "sliced"):
            raise ValueError(
                "reading: together is for whole weights and several ranks on a node, not for load: "
                f"{self.load} and num_ranks {self.num_ranks} on {self.num_nodes} node(s): remove reading"
            )

    @property
    def max_batch(self) -> int:
        """Number of pipeline stages, which work on different jobs. Other strategies gain nothing by batching."""
        return 1 if self.strategy == "auto" else ParallelSpec.of(self.strategy, self.num_ranks).pipeline

    @property
    def splits_tokens(self) -> bool:
        """True if ranks may share the tokens of a step, by the configuration alone."""
        return self.num_ranks > 1 and (
            self.strategy == "auto" or ParallelSpec.of(self.strategy, self.num_ranks).context > 1
        )

    @property
    def fills_prompts(self) -> bool:
        """True if prompts are padded to one shape, where the model allows it (``TorchOptions``)."""
        return self.torch is not None and self.torch.prompt_windows

    @property
    def num_offloaded(self) -> int:
        """Offloaded blocks of each transformer (``TorchOptions``)."""
        return 0 if self.torch is None else self.torch.offloaded_blocks

    @property
    def engine_options(self) -> TorchOptions | TensorRTOptions | None:
        """The section of the chosen engine; None for its defaults."""
        options: TorchOptions | TensorRTOptions | None = getattr(self, self.engine)
        return options

    def check_engine(
        self,
        dtype: DataType,
        *,
        merges: bool = False,
        switches: bool = False,
        attentions: tuple[Attention, ...] = (),
        eager_only: str = "",
    ) -> None:
        """Raise ValueError if the engine cannot run this configuration with a model of ``dtype``.

        ``merges``: adapters are merged at start; ``switches``: adapters change per request. ``attentions`` are those
        that requests may name. ``eager_only`` needs an opened checkpoint.
        """
        choice = EngineChoice(
            strategy=self.strategy,
            precision=self.precision,
            attention=self.attention,
            attentions=attentions,
            options=self.engine_options,
            num_ranks=self.num_ranks,
            gpus_per_rank=self.gpus_per_rank,
            dtype=dtype,
            merges=merges,
            switches=switches,
            eager_only=eager_only,
        )
        check_engine(self.engine, choice)


def must_slice(config: DenoiserConfig) -> bool | None:
    """Return whether ranks load slices; None if that depends on the model's size and the machine's memory.

    ValueError if the engine cannot load slices, or blocks are offloaded as well.
    """
    can_slice = config.engine != "tensorrt" and config.num_ranks > 1
    if config.load == "sliced" and not can_slice:
        raise ValueError(
            f"load: sliced needs the engine torch and several ranks, not {config.engine} on {config.num_ranks}"
        )
    if config.num_offloaded:
        if config.load == "sliced":
            raise ValueError("load: sliced divides the weights, torch.offloaded_blocks needs whole ones: remove one")
        return False
    if config.load != "auto" or not can_slice:
        return config.load == "sliced"
    if config.strategy == "auto":
        return None
    return ParallelSpec.of(config.strategy, config.num_ranks).divides_weights
