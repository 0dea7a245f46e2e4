"""The application's configuration: what YAML may say, checked when it is read. Unknown keys are errors.

Sections of the gang, of the engines and of the API are the frozen dataclasses that these use themselves: fields,
defaults and checks have one place, and pydantic validates them in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    model_validator,
)
from pydantic.dataclasses import dataclass

from deployments.api.settings import ApiLimits
from deployments.clips.settings import ClipLimits
from engines.core.engine import EngineChoice
from engines.gang.config import GangConfig
from engines.registry import ENGINES, check_engine, find_engine
from engines.tensorrt_engine.rules import TensorRTOptions
from engines.torch_engine.options import TorchOptions

DataType = Literal["auto", "float32", "bfloat16", "float16"]
STRICT = ConfigDict(extra="forbid")
"""For dataclasses of other modules inside these as well: they take it from what they are in."""


class _Config(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class AutoscalingConfig(_Config):
    """Replicas (for a Denoiser: gangs) between ``min_replicas`` and ``max_replicas``, by requests under way."""

    min_replicas: int = Field(default=1, ge=0)
    max_replicas: PositiveInt = 1
    target_ongoing_requests: PositiveFloat = 2.0
    downscale_delay_s: PositiveFloat = 600.0

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max_replicas < max(self.min_replicas, 1):
            raise ValueError(f"max_replicas {self.max_replicas} is below min_replicas {self.min_replicas}")
        return self


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ScaledConfig:
    """A deployment of ``num_replicas``, or of as many as ``autoscaling`` finds right."""

    num_replicas: PositiveInt = 1
    autoscaling: AutoscalingConfig | None = None

    def __post_init__(self) -> None:
        if self.autoscaling is not None and self.num_replicas != 1:
            raise ValueError(
                f"num_replicas {self.num_replicas} has no effect beside autoscaling: leave one of them out"
            )

    @property
    def max_num_replicas(self) -> int:
        return self.autoscaling.max_replicas if self.autoscaling else self.num_replicas


@dataclass(frozen=True, kw_only=True, config=STRICT)
class StageConfig(ScaledConfig):
    """One text encoder or decoder deployment. CPUs are Ray's logical ones; ``num_threads`` is what torch uses."""

    num_cpus: float = Field(default=0.2, ge=0)
    num_gpus: float = Field(default=0.0, ge=0)
    num_threads: PositiveInt = 1


SizeText = Annotated[str, Field(pattern=r"^\d+x\d+(x\d+)?$")]
"""Pixels, "1024x1024", and for clips frames, "832x480x81"."""


def _engine(name: str) -> str:
    if name == "auto":
        raise ValueError("auto is torch now, and the default: write torch, or leave the key out")
    find_engine(name)
    return name


def _tensorrt(section: object) -> object:
    if isinstance(section, Mapping) and "sizes" in section:
        raise ValueError("the key sizes is denoiser.warm_sizes now, which serves every engine")
    return section


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DenoiserConfig(ScaledConfig, GangConfig):
    """A gang, how many of them, and what its ranks run: how a step is split and compiled.

    ``strategy`` and ``precision`` are the engine's (see ``EngineChoice``); ``torch`` and ``tensorrt`` are the sections
    of one engine each. ``warm_sizes`` are compiled and captured at start, so that no request waits for that; on
    TensorRT they share one plan, which takes every size between them.

    ``load``: "whole" gives every rank all weights, so that teams of any size can form; "sliced" lets each rank read
    its share alone, for a model that fits no single device (with the engine torch, and a strategy that divides weights:
    tensor, pipeline). "auto" is "sliced" if the strategy says so, or is "auto" and whole weights would not fit.
    """

    engine: Annotated[str, AfterValidator(_engine)] = "torch"
    strategy: str = "auto"
    precision: str = "auto"
    load: Literal["auto", "whole", "sliced"] = "auto"
    warm_sizes: tuple[SizeText, ...] = ()
    torch: TorchOptions | None = None
    tensorrt: Annotated[TensorRTOptions | None, BeforeValidator(_tensorrt)] = None

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

    @property
    def engine_options(self) -> TorchOptions | TensorRTOptions | None:
        """The section of the chosen engine; None for its defaults."""
        options: TorchOptions | TensorRTOptions | None = getattr(self, self.engine)
        return options

    def check_engine(self, dtype: DataType) -> None:
        """ValueError if the engine cannot do what is asked of it, with a model of ``dtype``."""
        choice = EngineChoice(
            strategy=self.strategy,
            precision=self.precision,
            options=self.engine_options,
            num_ranks=self.num_ranks,
            gpus_per_rank=self.gpus_per_rank,
            dtype=dtype,
        )
        check_engine(self.engine, choice)


class ModelConfig(_Config):
    """One served model. ``path``: a shipped checkpoint's name, a diffusers directory, or a hub id."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    path: str = ""
    dtype: DataType = "auto"
    text_encoder: StageConfig = StageConfig()
    denoiser: DenoiserConfig = DenoiserConfig()
    decoder: StageConfig = StageConfig()

    @model_validator(mode="after")
    def _engine_takes_the_dtype(self) -> Self:
        self.denoiser.check_engine(self.dtype)
        return self

    @property
    def source(self) -> str:
        return self.path or self.name


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ApiConfig(ApiLimits, ClipLimits):
    """Limits of the HTTP API, and what its deployment gets.

    Keys and database URL come from the environment, as does ``data_dir`` if not given here.
    """

    data_dir: Path | None = None
    max_ongoing_requests: PositiveInt = 256
    num_replicas: PositiveInt = 1
    num_cpus: float = Field(default=0.2, ge=0)

    def __post_init__(self) -> None:
        ApiLimits.__post_init__(self)
        ClipLimits.__post_init__(self)

    def part(self, limits: type[ApiLimits | ClipLimits]) -> dict[str, Any]:
        """The fields that are those of ``limits``."""
        return {field.name: getattr(self, field.name) for field in fields(limits)}


class AppConfig(_Config):
    """Everything that ``build_app`` needs: the ``args`` of the application in a Serve config file."""

    models: tuple[ModelConfig, ...] = Field(min_length=1)
    api: ApiConfig = ApiConfig()

    @model_validator(mode="after")
    def _unique_names(self) -> Self:
        names = [model.name for model in self.models]
        if len(set(names)) != len(names):
            raise ValueError(f"model names must differ, given: {', '.join(names)}")
        return self


class ServeConfig(_Config):
    """A whole config file, which is also a Ray Serve config file (``serve deploy`` takes it as it is)."""

    proxy_location: Literal["HeadOnly", "EveryNode"] = "HeadOnly"
    http_options: HttpOptions
    logging_config: dict[str, Any] = {}
    applications: tuple[ApplicationConfig, ...] = Field(min_length=1, max_length=1)

    @property
    def app(self) -> AppConfig:
        return self.applications[0].args

    def with_data_dir(self, data_dir: Path) -> Self:
        """The same, with jobs and files kept in ``data_dir``."""
        document = self.model_dump()
        document["applications"][0]["args"]["api"]["data_dir"] = data_dir
        return self.model_validate(document)

    def with_http(self, **options: Any) -> Self:
        """The same with other ``http_options``; ``port=0`` takes any free port."""
        return self.model_validate(self.model_dump() | {"http_options": self.http_options.model_dump() | options})


class HttpOptions(_Config):
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    keep_alive_timeout_s: PositiveInt = 90
    request_timeout_s: PositiveFloat | None = None


class ApplicationConfig(_Config):
    name: Literal["troupe"] = "troupe"
    route_prefix: Literal["/"] = "/"
    import_path: Literal["deployments.app:build_app"] = "deployments.app:build_app"
    runtime_env: dict[str, Any] = {}
    args: AppConfig


ServeConfig.model_rebuild()
