"""Problems that prevent a configuration from running on this machine, found before the start."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from deployments.cli.local import OWN_NAMES, client_problem, folder_problem, token_files, token_problem
from deployments.clips.settings import DATABASE
from deployments.config import CONFIGS, ServeConfig
from deployments.door.door import FOLDER as DOOR_FOLDER
from deployments.door.door import listen
from deployments.model_config import ModelConfig
from deployments.observability.metrics_settings import DEFAULT_PORT
from deployments.places import file_refusal, is_open_to_others, read_text, refusal
from deployments.requests.recipe_choice import recipe_problems
from deployments.settings import Settings, process_environment
from deployments.sizing.memory_budget import budget_of
from deployments.stages.stage_config import DenoiserConfig, ScaledConfig, StageConfig, must_slice
from pipelines.checkpoint import Checkpoint
from pipelines.loading import ModelSource
from pipelines.preconditions import adapter_problems, decoder_problems, weight_problems

if TYPE_CHECKING:
    from pipelines.media.provenance import Credentials


DATA_FOLDERS = ("videos", "files", "batches", "answers", "servers")
"""Folders in the data directory, which must be writable and private."""
EXTRAS: Mapping[str, tuple[str, ...]] = {
    "export": ("onnx", "onnx_ir", "onnxscript", "onnxruntime", "filelock", "sympy"),
    "gpu": ("tensorrt",),
    "sleep": ("torch_memory_saver",),
    "rtx": ("tensorrt_rtx_bindings",),
    "gguf": ("gguf",),
    "postgres": ("asyncpg",),
    "provenance": ("c2pa", "cryptography"),
    "train": ("matplotlib", "scipy"),
}
"""Modules that each extra installs."""
LAST_DAYS = 30
"""Days before a certificate's end in which a start warns."""
NUM_METRICS_PORTS = 100


def check(config: ServeConfig) -> None:
    """Raise ValueError with all problems of ``config`` on this machine."""
    if found := list(problems(config)):
        raise ValueError("; ".join(found))


def problems(config: ServeConfig) -> Iterator[str]:
    """Yield problems and what to change, one sentence each."""
    yield from environment_problems(config)
    for model in config.app.models:
        yield from _model(model)
    yield from _provenance(config)
    yield from _sleep(config)
    yield from _gpus(config)
    yield from _ports(config)


def environment_problems(config: ServeConfig) -> Iterator[str]:
    """Yield problems of this machine and environment and what to change, one sentence each."""
    try:
        settings = Settings()
    except ValueError as error:
        yield str(error)
        return
    try:
        settings.key_ring()
    except (OSError, ValueError) as error:
        yield f"the API keys cannot be read: {error}"
    folder, given_by = data_directory(config, settings)
    if reason := _refusal(folder, has_database=not (settings.database_url or config.app.api.database)):
        yield f"{reason}; clips and pictures are kept there: let this user write, or set {given_by} to another folder"
    if reason := refusal(DOOR_FOLDER):
        yield f"{reason}; HAProxy's files are written there: let this user write"
    for name in config.app.enhancer_key_variables:
        try:
            Settings.secret(name)
        except ValueError as error:
            yield f"prompt_enhancer.api_key_variable: {error}"
    variables = process_environment()
    yield from filter(None, (folder_problem(variables), token_problem(variables)))


def data_directory(config: ServeConfig, settings: Settings) -> tuple[Path, str]:
    """Return the folder of clips and pictures, and the setting that names it."""
    own = config.app.api.data_dir
    return (settings.data_dir.absolute(), "TROUPE_DATA_DIR") if own is None else (own.absolute(), "api.data_dir")


def open_to_others() -> list[Path]:
    """Return private files that other users of this machine can read: clips, pictures, records, Ray's token."""
    settings = Settings()
    names = [*DATA_FOLDERS, *(f"{DATABASE}{ending}" for ending in ("", "-wal", "-shm"))]
    paths = [settings.data_dir / name for name in names if is_open_to_others(settings.data_dir)]
    return [path for path in (*paths, *token_files(process_environment())) if is_open_to_others(path)]


def _refusal(folder: Path, *, has_database: bool) -> str | None:
    files = [folder / DATABASE] if has_database and (folder / DATABASE).is_file() else []
    folders = [folder, *(path for name in DATA_FOLDERS if (path := folder / name).is_dir())]
    reasons = [*(refusal(one) for one in folders), *(file_refusal(one) for one in files)]
    return next(filter(None, reasons), None)


def install_hint(extra: str) -> str:
    """Return the command for the root of a clone, since the package is on no index."""
    return f"pip install '.[{extra}]'"


def hint_for(module: str) -> str | None:
    """Return the command that installs ``module``; None if no extra has it."""
    package = module.split(".")[0]
    return next((install_hint(extra) for extra, modules in EXTRAS.items() if package in modules), None)


def warnings(config: ServeConfig) -> Iterator[str]:
    """Yield settings that are slow or open to others and what to change, one sentence each."""
    host = config.http_options.host
    if host not in OWN_NAMES and not _asks_for_keys():
        yield (
            f"anybody who reaches {host} can use this server, which asks for no key: set TROUPE_API_KEYS_FILE or "
            "TROUPE_API_KEYS, or say --host 127.0.0.1"
        )
    yield from _provenance_warnings(config)
    for model in config.app.models:
        stages: dict[str, StageConfig] = {"text_encoder": model.text_encoder}
        if model.stages == "apart":
            stages["decoder"] = model.decoder
        without = [name for name, stage in stages.items() if not stage.num_gpus]
        if model.denoiser.gpus_per_rank and without:
            yield (
                f"the model {model.name}: its ranks have GPUs, and {' and '.join(without)} on CPU cores will be slow: "
                "say num_gpus: 0.1 there, with gpus_per_rank: 0.8"
            )


def _asks_for_keys() -> bool:
    try:
        settings = Settings()
    except ValueError:
        return True  # `environment_problems` reports it
    return bool(settings.api_keys.get_secret_value()) or settings.api_keys_file is not None


def with_metrics_port(config: ServeConfig) -> ServeConfig:
    """Return ``config`` with ``auto`` metrics on the default port or the next free one.

    ValueError if none of NUM_METRICS_PORTS is free. The ports are below the ephemeral ones, which Ray's processes take.
    """
    metrics, own = config.app.metrics, config.http_options.port
    if metrics.port != "auto":
        return config
    ports = range(DEFAULT_PORT, DEFAULT_PORT + NUM_METRICS_PORTS)
    for port in ports:
        with suppress(ValueError):
            if port != own:
                listen(metrics.host, port).close()
                return config.with_metrics(port)
    raise ValueError(
        f"no port of {metrics.host} from {ports[0]} to {ports[-1]} is free for metrics: choose one with --metrics-port "
        "or metrics.port, or 0 and null for none"
    )


def num_gpus_needed(config: ServeConfig) -> int:
    """Return the GPUs of the application at its start: ranks of different share groups never share one.

    Encoders and decoders may. Replicas that autoscaling adds later do not count. A decoder may compute on GPUs without
    a share of them.
    """
    num_ranks, shares, num_seen = 0, 0.0, 0
    for gang in _gangs_apart(config):
        if gang.gpus_per_rank:
            num_ranks += _num_at_start(gang) * gang.num_ranks
        shares += _num_at_start(gang) * gang.num_ranks * gang.gpus_per_rank
    for model in config.app.models:
        shares += sum(_num_at_start(stage) * stage.num_gpus for stage in (model.text_encoder, model.decoder))
        if model.decoder.sees_all_gpus:
            num_seen = max(num_seen, model.decoder.num_devices)
    return max(num_ranks, math.ceil(shares), num_seen)


def _gangs_apart(config: ServeConfig) -> Iterator[DenoiserConfig]:
    """Yield the gangs that need GPUs of their own: of each share group the largest."""
    largest: dict[str, DenoiserConfig] = {}
    for model in config.app.models:
        if not model.share:
            yield model.denoiser
        elif model.share not in largest or model.denoiser.num_ranks > largest[model.share].num_ranks:
            largest[model.share] = model.denoiser
    yield from largest.values()


def _num_at_start(scaled: ScaledConfig) -> int:
    return scaled.num_replicas if scaled.autoscaling is None else scaled.autoscaling.min_replicas


def _ports(config: ServeConfig) -> Iterator[str]:
    http, metrics = config.http_options, config.app.metrics
    try:
        listen(http.host, http.port).close()
    except ValueError as error:
        yield str(error)  # a second server's metrics port is taken too: one sentence is enough
        return
    if metrics.number is None:
        return
    if metrics.port == "auto":
        try:
            _ = with_metrics_port(config)
        except ValueError as error:
            yield str(error)
        return
    if metrics.number == http.port:
        yield f"metrics.port is {metrics.number}, which is the API's own port: choose another"
        return
    try:
        listen(metrics.host, metrics.number).close()
    except ValueError:
        yield (
            f"cannot show metrics at port {metrics.number} of {metrics.host}, which is taken: choose another port with "
            "--metrics-port or metrics.port, or 0 and null for none"
        )


def _provenance(config: ServeConfig) -> Iterator[str]:
    try:
        _ = _credentials(config)
    except ModuleNotFoundError as error:
        if (hint := hint_for(str(error.name))) is None:
            raise
        yield f"api.provenance: {error.name} is not installed, which signs files: {hint}"
    except ValueError as error:
        yield f"api.provenance: {error}"


def _provenance_warnings(config: ServeConfig) -> Iterator[str]:
    with suppress(ModuleNotFoundError, ValueError):  # `_provenance` reports them
        credentials, provenance = _credentials(config), config.app.api.provenance
        if credentials is None or provenance is None:
            return
        if credentials.ends_at - datetime.now(UTC) < timedelta(days=LAST_DAYS):
            yield f"{provenance.certificate} is valid until {credentials.ends_at:%Y-%m-%d}: get a new one before"
        if is_open_to_others(provenance.key):
            yield f"other users can read {provenance.key}: `chmod go= {provenance.key}`"


def _credentials(config: ServeConfig) -> Credentials | None:
    provenance = config.app.api.provenance
    if provenance is None:
        return None
    from pipelines.media.provenance import Credentials

    return Credentials.read(provenance.certificate, provenance.key)


def _model(model: ModelConfig) -> Iterator[str]:
    try:
        for problem in _model_problems(model):
            yield f"the model {model.name}: {problem}"
    except (OSError, ValueError) as error:
        yield f"the model {model.name}: {error}"
    except Exception:  # httpx cannot read a variable of the environment
        if (reason := client_problem()) is None:
            raise
        yield f"the model {model.name} cannot be downloaded: {reason}"


def _model_problems(model: ModelConfig) -> Iterator[str]:
    checkpoint = Checkpoint.open(model.source, weights=False)
    _ = checkpoint.defaults
    yield from model.path_problems(checkpoint.spec)
    yield from adapter_problems(checkpoint, model.adapters)
    if Path(ModelSource.parse(model.source).base).is_dir():  # a hub's weights may not be downloaded yet
        yield from weight_problems(checkpoint)
    if must_slice(model.denoiser) and checkpoint.file is not None:
        yield f"every rank would read its share of {checkpoint.file}, which is read whole: say load: whole"
    decoder = model.decoder
    yield from decoder_problems(
        checkpoint.path,
        compiled=decoder.compile,
        limits_memory=decoder.memory_gib is not None,
        num_devices=decoder.num_devices,
    )
    eager_only = checkpoint.eager_only(is_split=model.denoiser.splits_tokens)
    model.denoiser.check_engine(model.dtype, eager_only=eager_only)
    if model.memory_gib is not None and not checkpoint.spec.is_whole:
        _ = budget_of(model)
    from deployments.ingress import make_card  # imports Ray Serve

    yield from recipe_problems(make_card(model))


def _sleep(config: ServeConfig) -> Iterator[str]:
    """Yield what weights on GPUs lack to sleep."""
    sharing = [model.name for model in config.app.models if model.sleeps and model.denoiser.gpus_per_rank]
    if sharing and find_spec("torch_memory_saver") is None:
        yield f"{', '.join(sharing)} share GPUs, which needs torch-memory-saver: {install_hint('sleep')}"


def _gpus(config: ServeConfig) -> Iterator[str]:
    needed = num_gpus_needed(config)
    if not needed:
        return
    import torch  # takes two seconds, needed for GPUs only

    available = torch.cuda.device_count()
    if needed > available:
        yield (
            f"the configuration asks for {needed} GPUs and this machine has {available}: take a shipped one that fits "
            f"({', '.join(_shipped_for(available))}), or lower num_ranks, gpus_per_rank, num_gpus and num_devices"
        )


def _shipped_for(num_gpus: int) -> list[str]:
    """Return the names of the shipped configurations that need no more GPUs."""
    files = sorted(CONFIGS.glob("*.yaml"))
    shipped = {file.stem: ServeConfig.model_validate(yaml.safe_load(read_text(file))) for file in files}
    return [name for name, config in shipped.items() if num_gpus_needed(config) <= num_gpus]
