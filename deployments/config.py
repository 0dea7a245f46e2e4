"""The application's configuration: what YAML may say, checked when it is read. Unknown keys are errors.

What it says of a model's deployments is in ``stages.config``, what it says of the API in the API's own settings.
"""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator
from pydantic.dataclasses import dataclass

from deployments.api.settings import ApiLimits
from deployments.clips.settings import ClipLimits
from deployments.door.settings import DoorSettings
from deployments.observability.metrics import MetricsSettings
from deployments.stages.config import STRICT, DataType, DecoderConfig, DenoiserConfig, EncoderConfig
from pipelines.lora.source import LoraSource, check_sources
from pipelines.request import MetadataLevel
from pipelines.single_file import with_base


def _model_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        allowed = "letters, digits, points, dashes and underscores, the first a letter or a digit"
        raise ValueError(f"{name!r} is no name for a model: it must be made of {allowed}")
    return name


ModelName = Annotated[str, AfterValidator(_model_name)]


class _Config(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(_Config):
    """One served model. ``path``: a shipped checkpoint's name, a diffusers directory, or a hub id; or a transformer as
    one safetensors file, of which ``base`` is all else, named in one of these ways.

    ``aliases`` are further names that requests may give it, for clients with a fixed one ("gpt-image-1"). ``loras`` are
    its adapters: without a name they are always there, with one for the requests that name them. ``stages``: text
    encoder and decoder are deployments of their own, or "together" one, as the section ``text_encoder`` says.
    """

    name: ModelName
    path: str = ""
    base: str = ""
    aliases: tuple[ModelName, ...] = ()
    dtype: DataType = "auto"
    loras: tuple[LoraSource, ...] = ()
    stages: Literal["apart", "together"] = "apart"
    text_encoder: EncoderConfig = EncoderConfig()
    denoiser: DenoiserConfig = DenoiserConfig()
    decoder: DecoderConfig = DecoderConfig()

    @model_validator(mode="after")
    def _engine_takes_what_is_asked(self) -> Self:
        check_sources(self.loras)
        _ = self.source
        names = [one.name for one in self.loras]
        self.denoiser.check_engine(self.dtype, merges="" in names, switches=any(names))
        return self

    @model_validator(mode="after")
    def _decoder_is_there(self) -> Self:
        if self.stages == "together" and self.decoder != DecoderConfig():
            raise ValueError(
                "the section decoder has no effect with stages: together, where text_encoder is for both: leave one of "
                "them out"
            )
        return self

    @property
    def max_jobs(self) -> int:
        """How many jobs the gangs take, the running ones included."""
        return self.denoiser.max_num_replicas * (self.denoiser.max_running_jobs + self.denoiser.max_waiting_jobs)

    @property
    def max_open_pictures(self) -> int:
        """How many pictures the gangs take, and a quarter more for those that are encoded or decoded meanwhile."""
        return self.max_jobs + max(4, self.max_jobs // 4)

    @property
    def source(self) -> str:
        return with_base(self.path or self.name, self.base)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ProvenanceConfig:
    """Files in PEM form: ``certificate`` with those of its issuers behind it, and its private ``key``."""

    certificate: Path
    key: Path

    def absolute(self) -> ProvenanceConfig:
        return ProvenanceConfig(certificate=self.certificate.absolute(), key=self.key.absolute())


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ApiConfig(ApiLimits, ClipLimits):
    """Limits of the HTTP API, and what its deployment gets.

    Keys and database URL come from the environment, as does ``data_dir`` if not given here. ``max_open_pictures`` is
    by model; without it, it is what the model's gangs take and a little more. ``max_ongoing_requests`` is what Serve
    hands to a replica: more than the API works on, so that it can refuse what is too much.

    ``metadata`` is what pictures and clips say of their requests; with ``provenance`` they are signed.
    """

    data_dir: Path | None = None
    metadata: MetadataLevel = "full"
    provenance: ProvenanceConfig | None = None
    max_open_pictures: PositiveInt | None = None
    max_ongoing_requests: PositiveInt = 4096
    num_replicas: PositiveInt = 1
    num_cpus: float = Field(default=0.2, ge=0)

    def __post_init__(self) -> None:
        ApiLimits.__post_init__(self)
        ClipLimits.__post_init__(self)
        if self.max_ongoing_requests <= self.max_open_requests:
            raise ValueError(
                f"max_ongoing_requests is {self.max_ongoing_requests}; it must be above max_open_requests, which is "
                f"{self.max_open_requests}, so that there is room for refusals"
            )

    def part(self, limits: type[ApiLimits | ClipLimits]) -> dict[str, Any]:
        """Return the fields of ``limits``."""
        return {field.name: getattr(self, field.name) for field in fields(limits)}


class AppConfig(_Config):
    """Everything that ``build_app`` needs: the ``args`` of the application in a Serve config file.

    ``fork_workers``: workers are forked from one process a node that has their libraries, where that can be done.
    """

    models: tuple[ModelConfig, ...] = Field(min_length=1)
    fork_workers: bool = True
    api: ApiConfig = ApiConfig()
    door: DoorSettings = DoorSettings()
    metrics: MetricsSettings = MetricsSettings()

    @property
    def max_open_pictures(self) -> dict[str, int]:
        """How many pictures of each model a replica of the API works on at a time."""
        return {model.name: self.api.max_open_pictures or model.max_open_pictures for model in self.models}

    @model_validator(mode="after")
    def _unique_names(self) -> Self:
        names = [name for model in self.models for name in (model.name, *model.aliases)]
        if len(set(names)) != len(names):
            raise ValueError(f"model names and aliases must differ, given: {', '.join(names)}")
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
        """Return a copy that stores jobs and files in ``data_dir``."""
        document = self.model_dump()
        document["applications"][0]["args"]["api"]["data_dir"] = data_dir
        return self.model_validate(document)

    def with_metrics(self, port: int | None) -> Self:
        """Return a copy with metrics on ``port``, or without metrics."""
        document = self.model_dump()
        document["applications"][0]["args"]["metrics"]["port"] = port
        return self.model_validate(document)

    def with_http(self, **options: Any) -> Self:
        """Return a copy with other ``http_options``; ``port=0`` takes any free port."""
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
