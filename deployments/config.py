"""The application's configuration: what YAML may say, checked when it is read. Unknown keys are errors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from engines.core.precision import PRECISIONS
from engines.core.spec import ParallelSpec

DataType = Literal["auto", "float32", "bfloat16", "float16"]
EngineName = Literal["auto", "torch", "tensorrt"]


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


class _ScaledConfig(_Config):
    """A deployment of ``num_replicas``, or of as many as ``autoscaling`` finds right."""

    num_replicas: PositiveInt = 1
    autoscaling: AutoscalingConfig | None = None

    @model_validator(mode="after")
    def _scaled_one_way(self) -> Self:
        if self.autoscaling is not None and self.num_replicas != 1:
            raise ValueError(
                f"num_replicas {self.num_replicas} has no effect beside autoscaling: leave one of them out"
            )
        return self

    @property
    def max_num_replicas(self) -> int:
        return self.autoscaling.max_replicas if self.autoscaling else self.num_replicas


class StageConfig(_ScaledConfig):
    """One text encoder or decoder deployment. CPUs are Ray's logical ones; ``num_threads`` is what torch uses."""

    num_cpus: float = Field(default=0.2, ge=0)
    num_gpus: float = Field(default=0.0, ge=0)
    num_threads: PositiveInt = 1


class NcclConfig(_Config):
    """Process groups between GPUs; see ``engines.parallel.nccl_options.NcclOptions``."""

    high_priority: bool = True
    min_ctas: PositiveInt | None = None
    max_ctas: PositiveInt | None = None


SizeText = Annotated[str, Field(pattern=r"^\d+x\d+(x\d+)?$")]
"""Pixels, "1024x1024", and for clips frames, "832x480x81"."""


class TensorRTConfig(_Config):
    """For ``engine: tensorrt`` alone. ``weights``: inputs of one plan for all fine-tunes, or constants of the plan.

    ``sizes`` ("1024x1024", for clips "832x480x81") are prepared at start and share one plan, which takes every size
    between them; others get a plan when they first come. Plans are kept in ``cache_dir`` (~/.cache/troupe/plans).
    """

    weights: Literal["inputs", "constants"] = "inputs"
    cache_dir: Path | None = None
    sizes: tuple[SizeText, ...] = ()


class TorchConfig(_Config):
    """For ``engine: torch`` and ``auto`` alone. ``calibration``: what ``troupe calibrate`` wrote, for ``precision:
    fp8-static``. Without ``peer_memory`` ranks exchange through NCCL alone."""

    calibration: Path | None = None
    peer_memory: bool = True


class DenoiserConfig(_ScaledConfig):
    """The gang: how many ranks, what each gets, how a step is split and compiled, how long things may take.

    ``warm_sizes`` are compiled and captured at start, so that no request waits for that. ``elastic``: the more jobs
    run, the fewer ranks work on each; if not, all take turns on all ranks, and a seed fixes every bit. ``max_batch``
    jobs of one shape at most are advanced together.

    ``load``: "whole" gives every rank all weights, so that teams of any width can form; "sliced" lets each rank read
    its share alone, for a model that fits no single device (with the engine torch, and a strategy that divides weights:
    tensor, pipeline). "auto" is "sliced" if the strategy says so, or is "auto" and whole weights would not fit.
    """

    num_ranks: PositiveInt = 2
    num_nodes: PositiveInt = 1
    cpus_per_rank: float = Field(default=0.5, ge=0)
    gpus_per_rank: float = Field(default=0.0, ge=0, le=1)
    threads_per_rank: PositiveInt = 1
    engine: EngineName = "auto"
    strategy: str = "auto"
    precision: str = "auto"
    load: Literal["auto", "whole", "sliced"] = "auto"
    warm_sizes: tuple[SizeText, ...] = ()
    elastic: bool = False
    max_batch: PositiveInt = 1
    torch: TorchConfig = TorchConfig()
    tensorrt: TensorRTConfig = TensorRTConfig()
    step_deadline_s: PositiveFloat = 60.0
    start_deadline_s: PositiveFloat = 600.0
    plans_ahead: PositiveInt = 2
    max_running_jobs: PositiveInt = 4
    max_waiting_jobs: PositiveInt = 32
    nccl: NcclConfig = NcclConfig()

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.strategy != "auto":
            ParallelSpec.of(self.strategy, self.num_ranks)
        if self.engine != "tensorrt" and self.precision not in PRECISIONS:
            known = ", ".join(PRECISIONS)
            raise ValueError(f"precision is {self.precision!r}; engine {self.engine} knows {known}")
        return self

    @model_validator(mode="after")
    def _calibrated(self) -> Self:
        if (self.precision == "fp8-static") != (self.torch.calibration is not None):
            raise ValueError(
                f"precision {self.precision} with torch.calibration {self.torch.calibration}: fp8-static needs a file "
                "that `troupe calibrate` wrote, and nothing else takes one"
            )
        return self


class ModelConfig(_Config):
    """One served model. ``path``: a shipped checkpoint's name, a diffusers directory, or a hub id."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    path: str = ""
    dtype: DataType = "auto"
    text_encoder: StageConfig = StageConfig()
    denoiser: DenoiserConfig = DenoiserConfig()
    decoder: StageConfig = StageConfig()

    @model_validator(mode="after")
    def _engine_can_do_it(self) -> Self:
        """What TensorRT cannot do is refused here, not when the ranks have loaded their weights."""
        if self.denoiser.engine == "tensorrt":
            from engines.tensorrt_engine import rules

            config = self.denoiser
            rules.check_device(gpus_per_rank=config.gpus_per_rank)
            rules.check_dtype(precision=config.precision, dtype=self.dtype)
            rules.check_options(
                strategy=config.strategy,
                precision=config.precision,
                weights=config.tensorrt.weights,
                num_ranks=config.num_ranks,
            )
        return self

    @property
    def source(self) -> str:
        return self.path or self.name


class ApiConfig(_Config):
    """Limits of the HTTP API. Keys and database URL come from the environment, as does ``data_dir`` if not given here.

    ``public_url`` replaces the host of the request in URLs that are handed out. Finished clips are deleted after
    ``keep_videos_s``, if that is given.
    """

    data_dir: Path | None = None
    max_body_bytes: PositiveInt = 1 << 20
    max_images_per_request: PositiveInt = 4
    max_concurrent_videos: PositiveInt = 2
    max_waiting_videos: PositiveInt = 100
    keep_videos_s: PositiveFloat | None = None
    public_url: str = ""
    max_ongoing_requests: PositiveInt = 256
    num_replicas: PositiveInt = 1
    num_cpus: float = Field(default=0.2, ge=0)


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
