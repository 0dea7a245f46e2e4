"""Schema of the application's configuration. Unknown keys are errors.

Sections of a model's deployments are in ``stages.stage_config``, limits of the API in ``http.settings``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

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

from deployments.clips.settings import ClipLimits
from deployments.clips.webhooks import WebhookSettings
from deployments.door.door_settings import DoorSettings
from deployments.http.settings import ApiLimits
from deployments.observability.metrics_settings import MetricsSettings
from deployments.requests.enhancer_config import PromptEnhancerConfig
from deployments.requests.fields import Quality
from deployments.stages.stage_config import (
    STRICT,
    AutoscalingConfig,
    DataType,
    DecoderConfig,
    DenoiserConfig,
    EncoderConfig,
)
from engines.core.spec import Attention
from pipelines.control_network import UPSAMPLER, with_network
from pipelines.lora.source import LoraLimits, LoraSource, check_sources
from pipelines.recipes import Recipe, check_recipe_name
from pipelines.request import MetadataLevel
from pipelines.single_file import with_base
from pipelines.workflow import with_workflow


def _model_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        allowed = "letters, digits, points, dashes and underscores, the first a letter or a digit"
        raise ValueError(f"{name!r} is no name for a model: it must be made of {allowed}")
    return name


def _recipes(section: object) -> object:
    recipes = section.items() if isinstance(section, Mapping) else ()
    for name, recipe in recipes:
        if isinstance(recipe, Mapping) and (given := [key for key in WEIGHT_KEYS if key in recipe]):
            raise ValueError(
                f"the recipe {name} has {given[0]}, and requests share one copy of the weights: serve a second model "
                f"of the same path with denoiser.{given[0]}, under a name of its own, and leave it out here"
            )
    return section


WEIGHT_KEYS = ("precision", "quantization")
"""Keys of weights, which no request changes."""
STORAGE = re.compile(r"(?!file:)[a-z][a-z0-9+]*://[^/\s]+(/\S*)?")
ModelName = Annotated[str, AfterValidator(_model_name)]


class _Config(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


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


class ModelConfig(_Config):
    """One served model."""

    name: ModelName
    path: str = ""
    """A shipped checkpoint's name, a diffusers directory, a hub id, or a transformer as one file."""
    base: str = ""
    """All other parts of a model with a transformer file, as a directory, name or hub id."""
    controlnet: str = ""
    """A control network that is not in the model's directory, as a directory or hub id."""
    upsampler: str = ""
    """A latent upsampler that is not in the model's directory, as a directory or hub id."""
    workflow: str = ""
    """A use of the model that needs another of its transformers (MiniMax-H3: ref2va)."""
    aliases: tuple[ModelName, ...] = ()
    """Further names in requests, for clients with a fixed one ("gpt-image-1")."""
    dtype: DataType = "auto"
    loras: tuple[LoraSource, ...] = ()
    """Adapters: merged without a name, else for the requests that name them."""
    runtime_loras: LoraLimits | None = None
    """Limits of adapters that clients add at run time; None: they may add none."""
    prompt_enhancer: PromptEnhancerConfig | None = None
    """Rewrites prompts; None: that of ``api``, if there is one."""
    recipes: Annotated[dict[str, Recipe], BeforeValidator(_recipes)] = {}
    """Defaults of requests that name one, by its name: those that ship with the family, or of one's own."""
    qualities: dict[Quality, str] = {}
    """Recipe that a request's ``quality`` stands for; the others change the number of steps alone."""
    memory_gib: PositiveFloat | None = None
    """Memory of each GPU: what does not fit is made to, by the cheapest savings; None: nothing is changed."""
    allow_quantization: bool = False
    """Savings of ``memory_gib`` may quantise the transformer, if no lossless ones suffice."""
    share: str = ""
    """Name of a group of models whose gangs are on the same GPUs. The gangs that fit are awake; the others sleep in
    host memory. Empty: GPUs of its own."""
    stages: Literal["apart", "together"] = "apart"
    """Text encoder and decoder as two deployments, or one with the section ``text_encoder``."""
    text_encoder: EncoderConfig = EncoderConfig()
    denoiser: DenoiserConfig = DenoiserConfig()
    decoder: DecoderConfig = DecoderConfig()

    @model_validator(mode="after")
    def _check_engine(self) -> Self:
        for name in self.recipes:
            check_recipe_name(name)
        check_sources(self.adapters)
        _ = self.source
        names = [one.name for one in self.adapters]
        self.denoiser.check_engine(
            self.dtype,
            merges="" in names,
            switches=any(names) or self.runtime_loras is not None,
            attentions=self.attentions,
        )
        return self

    @model_validator(mode="after")
    def _check_memory(self) -> Self:
        if self.allow_quantization and self.memory_gib is None:
            raise ValueError("allow_quantization has no effect without memory_gib: give it as well, or leave it out")
        if self.memory_gib is None:
            return self
        if self.share:
            raise ValueError(
                f"memory_gib is for a model with GPUs of its own, and share is {self.share}: limit the group by "
                f"shares.{self.share}.memory_gib"
            )
        if self.denoiser.engine != "torch":
            raise ValueError(
                f"memory_gib needs engine: torch, and engine is {self.denoiser.engine}: remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _check_turns(self) -> Self:
        if not self.text_encoder.takes_turns:
            return self
        if self.share:
            raise ValueError(f"text_encoder.takes_turns has no effect beside share: {self.share}: remove one of them")
        if self.stages == "together":
            raise ValueError("text_encoder.takes_turns needs stages: apart, as it sleeps without the decoder")
        check_sleeping(self)
        return self

    @model_validator(mode="after")
    def _check_decoder(self) -> Self:
        if self.stages == "together" and self.decoder != DecoderConfig():
            raise ValueError(
                "the section decoder has no effect with stages: together, where text_encoder is for both: leave one of "
                "them out"
            )
        return self

    def whole_problems(self, family: str) -> Iterator[str]:
        """Yield the settings that a pipeline does not support that runs as a whole, on one rank a gang."""
        denoiser, decoder = self.denoiser, self.decoder
        settings = (
            ("engine", denoiser.engine, ("torch",)),
            ("num_ranks", denoiser.num_ranks, (1,)),
            ("strategy", denoiser.strategy, ("auto",)),
            ("precision", denoiser.precision, ("auto", "native")),
            ("attention", denoiser.attention, ("auto",)),
            *(("attention of a recipe", one, ("auto",)) for one in self.attentions[1:]),
            ("load", denoiser.load, ("auto", "whole")),
            ("warm_sizes", denoiser.warm_sizes, ((),)),
            ("torch", denoiser.torch, (None,)),
            ("loras", self.adapters, ((),)),
            ("runtime_loras", self.runtime_loras, (None,)),
            ("base", self.base, ("",)),
            ("memory_gib", self.memory_gib, (None,)),
            ("controlnet", self.controlnet, ("",)),
            ("upsampler", self.upsampler, ("",)),
            ("workflow", self.workflow, ("",)),
            ("text_encoder.compile", self.text_encoder.compile, (False,)),
            ("text_encoder.offloads_layers", self.text_encoder.offloads_layers, (False,)),
            ("decoder.compile", decoder.compile, (False,)),
            ("decoder.memory_gib", decoder.memory_gib, (None,)),
            ("decoder.num_devices", decoder.num_devices, (1,)),
        )
        for key, given, allowed in settings:
            if given not in allowed:
                needed = " or ".join(repr(one) for one in allowed)
                yield f"{key} is {given!r}; {family} runs as a whole pipeline on one rank: it must be {needed}"

    @property
    def sleeps(self) -> bool:
        """True if its weights sleep at times: those of a share group, or of an encoder that takes turns."""
        return bool(self.share) or self.text_encoder.takes_turns

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """Precisions of attention that requests may name: the gang's own, then those of recipes."""
        own = cast("Attention", self.denoiser.attention)
        return tuple(dict.fromkeys((own, *(one.attention for one in self.recipes.values() if one.attention))))

    @property
    def adapters(self) -> tuple[LoraSource, ...]:
        """The adapters of the model and those of its recipes."""
        return (*self.loras, *(source for name, recipe in self.recipes.items() for source in recipe.sources(name)))

    @property
    def max_jobs(self) -> int:
        """Number of jobs that the gangs admit, running ones included."""
        return self.denoiser.max_num_replicas * (self.denoiser.max_running_jobs + self.denoiser.max_waiting_jobs)

    @property
    def max_open_pictures(self) -> int:
        """Number of pictures that the gangs admit, and a quarter more for encoding and decoding."""
        return self.max_jobs + max(4, self.max_jobs // 4)

    @property
    def source(self) -> str:
        model = with_workflow(with_base(self.path or self.name, self.base), self.workflow)
        if self.controlnet and self.upsampler:
            raise ValueError("controlnet and upsampler are for different models: leave one of them out")
        return with_network(with_network(model, self.controlnet), self.upsampler, UPSAMPLER)


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
class ApiConfig(ApiLimits, ClipLimits):
    """Limits of the HTTP API, and resources of its deployment. Keys and database URL come from the environment."""

    data_dir: Path | None = None
    """None: the environment's data directory."""
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
    num_replicas: PositiveInt = 1
    autoscaling: AutoscalingConfig | None = None
    """Number of replicas by requests under way, replaces ``num_replicas``."""
    num_cpus: float = Field(default=0.2, ge=0)

    def __post_init__(self) -> None:
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
        if self.autoscaling is not None:
            self._check_autoscaling(self.autoscaling)

    def _check_autoscaling(self, scaling: AutoscalingConfig) -> None:
        if self.num_replicas != 1:
            raise ValueError(
                f"api.num_replicas {self.num_replicas} has no effect beside api.autoscaling: leave one of them out"
            )
        if not scaling.min_replicas:
            raise ValueError("api.autoscaling.min_replicas is 0; it must be at least 1: nothing else takes requests")

    @property
    def max_num_replicas(self) -> int:
        """The most replicas that there may be."""
        return self.autoscaling.max_replicas if self.autoscaling else self.num_replicas

    def part(self, limits: type[ApiLimits | ClipLimits]) -> dict[str, Any]:
        """Return the fields of ``limits``."""
        return {field.name: getattr(self, field.name) for field in fields(limits)}


class AppConfig(_Config):
    """The ``args`` of the application in a Serve config file, for ``build_app``."""

    models: tuple[ModelConfig, ...] = Field(min_length=1)
    shares: dict[str, ShareConfig] = {}
    """Limits of the groups that models ``share``, by name, and of models whose encoder takes turns, by the model's."""
    fork_workers: bool = True
    """Fork workers, where possible, from one process per node that has imported their libraries."""
    max_ranks: PositiveInt | None = None
    """Ranks of all gangs together that follow predicted work (``target_wait_s``); None: no limit."""
    api: ApiConfig = ApiConfig()
    door: DoorSettings = DoorSettings()
    metrics: MetricsSettings = MetricsSettings()

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


def check_sleeping(model: ModelConfig) -> None:
    """Raise ValueError if the weights of ``model`` cannot sleep."""
    stages = {"denoiser": model.denoiser, "text_encoder": model.text_encoder, "decoder": model.decoder}
    for stage, config in stages.items():
        if config.autoscaling is not None or config.num_replicas != 1:
            raise ValueError(f"{model.name}: {stage} has one replica without autoscaling where models share GPUs")
    if model.denoiser.engine != "torch":
        raise ValueError(f"{model.name}: models that share GPUs need engine: torch, whose weights can sleep")
    if model.denoiser.num_nodes != 1:
        raise ValueError(f"{model.name}: models that share GPUs are on one node: remove num_nodes")


class ServeConfig(_Config):
    """A whole config file, which ``serve deploy`` reads too."""

    proxy_location: Literal["HeadOnly", "EveryNode"] = "HeadOnly"
    http_options: HttpOptions
    logging_config: dict[str, Any] = {}
    applications: tuple[ApplicationConfig, ...] = Field(min_length=1, max_length=1)

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
