"""Schema of the application's configuration. Unknown keys are errors.

``model_config`` has the schema of a model, ``stages.stage_config`` of its deployments, ``http.settings`` of limits of
the API.
"""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, PositiveFloat, PositiveInt, model_validator
from pydantic.dataclasses import dataclass

from deployments.clips.settings import ClipLimits
from deployments.clips.webhooks import WebhookSettings
from deployments.door.door_settings import DoorSettings
from deployments.http.settings import ApiLimits
from deployments.model_config import SECTION, ModelConfig, check_sleeping
from deployments.observability.metrics_settings import MetricsSettings
from deployments.requests.enhancer_config import PromptEnhancerConfig
from deployments.stages.stage_config import STRICT, ApiScalingConfig, ScaledConfig
from pipelines.request import MetadataLevel

CONFIGS = Path(__file__).parent / "configs"
"""Shipped configurations."""
STORAGE = re.compile(r"(?!file:)[a-z][a-z0-9+]*://[^/\s]+(/\S*)?")


class _Config(BaseModel):
    model_config = SECTION


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ShareConfig:
    """Limits of models that share GPUs."""

    memory_gib: PositiveFloat | None = None
    """Memory of each device for them; None: nearly all of a GPU's, without limit on a CPU."""
    host_memory_gib: float | None = Field(default=None, ge=0)
    """Host memory that their sleeping weights may pin together. The rest lies in files, which the page cache serves.
    None: no limit."""

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory_gib is None else int(self.memory_gib * 2**30)

    @property
    def host_memory_bytes(self) -> int | None:
        return None if self.host_memory_gib is None else int(self.host_memory_gib * 2**30)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ProvenanceConfig:
    """Certificate and key that sign files, in PEM format."""

    certificate: Path
    """The certificate, followed by those of its issuers."""
    key: Path
    """Private key of the certificate."""

    def absolute(self) -> ProvenanceConfig:
        return ProvenanceConfig(certificate=self.certificate.absolute(), key=self.key.absolute())


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ApiConfig(ScaledConfig, ApiLimits, ClipLimits):
    """Limits of the HTTP API, and resources of its deployment. Keys and database URL come from the environment."""

    data_dir: Path | None = None
    """Folder of clips, files and the database; None: the environment's data directory."""
    database: str = ""
    """URL of a PostgreSQL or SQLite database, unless the environment has one; by default SQLite in the data directory.
    """
    storage: str = ""
    """URL of object storage for clips and pictures, such as s3://bucket/prefix; by default the data directory."""
    signed_urls: bool = False
    """Hand out URLs of the object storage, signed for a while, in place of what it holds."""
    webhooks: WebhookSettings | None = None
    """Where messages about clips may go; None: nowhere."""
    prompt_enhancer: PromptEnhancerConfig | None = None
    """Rewrites prompts for all models without one of their own."""
    metadata: MetadataLevel = "full"
    """Request settings in pictures and clips."""
    provenance: ProvenanceConfig | None = None
    """Signs files if set."""
    max_open_pictures: PositiveInt | None = None
    """Limit per model; None: ``ModelConfig.max_open_pictures``."""
    max_ongoing_requests: PositiveInt = 4096
    """Requests that Serve passes to a replica: more than the API's limit, so that it can refuse the rest."""
    autoscaling: ApiScalingConfig | None = None
    """Number of replicas by requests under way, replaces ``num_replicas``."""
    num_cpus: float = Field(default=0.2, ge=0)
    """Logical CPUs of Ray for each replica."""

    def __post_init__(self) -> None:
        ScaledConfig.__post_init__(self)
        ApiLimits.__post_init__(self)
        ClipLimits.__post_init__(self)
        if self.storage and not STORAGE.fullmatch(self.storage):
            allowed = "a URL such as s3://bucket/prefix or gs://bucket; for a folder, set data_dir"
            raise ValueError(f"storage is {self.storage!r}; it must be {allowed}")
        if self.signed_urls and not self.storage:
            raise ValueError("signed_urls is true, and there is no storage to sign for; set storage, or leave it out")
        if self.database:
            from deployments.database.database import database_url  # SQLAlchemy, for those that name a database

            database_url(self.database)
        if self.max_ongoing_requests <= self.max_open_requests:
            raise ValueError(
                f"max_ongoing_requests is {self.max_ongoing_requests}; it must be above max_open_requests, which is "
                f"{self.max_open_requests}, so that there is room for refusals"
            )
        if self.starts_on_demand:
            raise ValueError("api.autoscaling.min_replicas is 0; it must be at least 1: nothing else takes requests")

    def part(self, limits: type[ApiLimits | ClipLimits]) -> dict[str, Any]:
        """Return the fields of ``limits``."""
        return {field.name: getattr(self, field.name) for field in fields(limits)}


class AppConfig(_Config):
    """The ``args`` of the application in a Serve config file, for ``build_app``."""

    models: tuple[ModelConfig, ...] = Field(min_length=1)
    """Served models. Requests without a model get the first that suits them."""
    shares: dict[str, ShareConfig] = {}
    """Limits of the groups that models ``share``, by name, and of models whose encoder takes turns, by the model's."""
    fork_workers: bool = True
    """Fork workers, where possible, from one process per node that has imported their libraries."""
    max_ranks: PositiveInt | None = None
    """Ranks of all gangs together that follow predicted work (``target_wait_s``); None: no limit."""
    api: ApiConfig = ApiConfig()
    """Limits and resources of the HTTP API."""
    door: DoorSettings = DoorSettings()
    """Limits of HAProxy in front of it."""
    metrics: MetricsSettings = MetricsSettings()
    """Where metrics are served."""

    @property
    def max_open_pictures(self) -> dict[str, int]:
        """Limit of concurrent pictures by model, for one replica of the API."""
        return {model.name: self.api.max_open_pictures or model.max_open_pictures for model in self.models}

    @property
    def prompt_enhancers(self) -> dict[str, PromptEnhancerConfig]:
        """Prompt enhancers by model."""
        found = {model.name: model.prompt_enhancer or self.api.prompt_enhancer for model in self.models}
        return {model: enhancer for model, enhancer in found.items() if enhancer is not None}

    @property
    def enhancer_key_variables(self) -> list[str]:
        """Environment variables with the keys of prompt enhancers, each once, by name."""
        return sorted({one.api_key_variable for one in self.prompt_enhancers.values()} - {""})

    @model_validator(mode="after")
    def _minimum_fits(self) -> Self:
        scaled = [(model.denoiser, model.denoiser.autoscaling) for model in self.models]
        least = sum(gang.num_ranks * by.min_replicas for gang, by in scaled if by and by.target_wait_s is not None)
        if self.max_ranks is not None and least > self.max_ranks:
            raise ValueError(
                f"max_ranks is {self.max_ranks}, and the min_replicas of all models need {least} ranks: raise the one "
                "or lower the others"
            )
        return self

    @model_validator(mode="after")
    def _unique_names(self) -> Self:
        names = [name for model in self.models for name in (model.name, *model.aliases)]
        if len(set(names)) != len(names):
            raise ValueError(f"model names and aliases must differ, given: {', '.join(names)}")
        return self

    @model_validator(mode="after")
    def _check_shares(self) -> Self:
        named = {model.share for model in self.models if model.share}
        if unknown := self.shares.keys() - named - {model.name for model in self.models if model.sleeps}:
            raise ValueError(f"shares has {', '.join(sorted(unknown))}, which no model shares: say share: in models")
        for name in named:
            check_share(name, self.sharing(name))
        return self

    def sharing(self, name: str) -> tuple[ModelConfig, ...]:
        """Return the models of a share group."""
        return tuple(model for model in self.models if model.share == name)


def check_share(name: str, models: tuple[ModelConfig, ...]) -> None:
    """Raise ValueError if ``models`` cannot share GPUs."""
    if len(models) == 1:
        raise ValueError(f"share: {name} is said by {models[0].name} alone: give it to another model too, or remove it")
    for model in models:
        check_sleeping(model)
    if len({model.denoiser.gpus_per_rank for model in models}) > 1:
        given = ", ".join(f"{model.name} {model.denoiser.gpus_per_rank:g}" for model in models)
        raise ValueError(f"models that share GPUs need the same gpus_per_rank; share: {name} has {given}")


class ServeConfig(_Config):
    """A whole config file, which ``serve deploy`` reads too."""

    proxy_location: Literal["HeadOnly", "EveryNode"] = "HeadOnly"
    """Nodes with a proxy of Serve."""
    http_options: HttpOptions
    """Address and timeouts of the proxy."""
    logging_config: dict[str, Any] = {}
    """Ray Serve's options of logging."""
    applications: tuple[ApplicationConfig, ...] = Field(min_length=1, max_length=1)
    """One alone."""

    @property
    def app(self) -> AppConfig:
        return self.applications[0].args

    def with_data_dir(self, data_dir: Path) -> Self:
        """Return a copy that stores jobs and files in ``data_dir``, and nothing elsewhere."""
        document = self.model_dump()
        document["applications"][0]["args"]["api"] |= {
            "data_dir": data_dir,
            "database": "",
            "storage": "",
            "signed_urls": False,
            "webhooks": None,
        }
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
    """Options of Serve's HTTP proxy that Troupe supports."""

    host: str = "127.0.0.1"
    """Address to bind."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to bind; 0: any free one."""
    keep_alive_timeout_s: PositiveInt = 90
    """Time after which an idle connection is closed."""
    request_timeout_s: PositiveFloat | None = None
    """Longest request; None: no limit."""


class ApplicationConfig(_Config):
    """The application, as Serve's config files have it."""

    name: Literal["troupe"] = "troupe"
    route_prefix: Literal["/"] = "/"
    import_path: Literal["deployments.app:build_app"] = "deployments.app:build_app"
    runtime_env: dict[str, Any] = {}
    """Ray's runtime environment."""
    args: AppConfig
    """Arguments of ``build_app``."""


ServeConfig.model_rebuild()
