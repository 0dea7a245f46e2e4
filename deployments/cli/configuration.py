"""The configuration of one model on this machine, for ``troupe serve MODEL``."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from deployments.cli.serving import load_config, parse_config, shipped_configs
from deployments.config import CONFIGS, ServeConfig
from deployments.sizing.fit import usual_limit_gib
from pipelines.defaults import Defaults
from pipelines.loading import SHIPPED, ModelSource, hub_id_of, resolve_configuration
from pipelines.preconditions import decoder_problems

ENDINGS = (".yaml", ".yml", ".json")
START_DEADLINE_S = 900
"""A gang of a large model loads, compiles and captures for minutes."""
STEP_DEADLINE_S, REFERENCES_DEADLINE_S = 30, 300
"""The longest a warm step may take; the second is for models whose references make a step up to ten times as long."""


def is_config(name: str) -> bool:
    """Return whether ``name`` means a config file or a shipped config, not a model."""
    path = Path(name)
    is_file = path.is_file() and path.suffix != ".safetensors"
    return is_file or path.suffix in ENDINGS or (CONFIGS / f"{name}.yaml").is_file()


def config_for(
    name: str, num_ranks: int | None = None, memory_gib: float | None = None, *, allow_quantization: bool = False
) -> ServeConfig:
    """Return the configuration of that name, or one for the model ``name``.

    The other arguments are for models only. ``num_ranks`` defaults to the number of this machine's GPUs, at least 1.
    ``memory_gib`` and ``allow_quantization`` are keys of the model. ValueError if ``name`` is neither, or if one of
    them is given with a config.
    """
    if memory_gib is not None and not memory_gib > 0:
        raise ValueError(f"--memory is {memory_gib:g}; it must be above 0, in GiB a GPU")
    own: dict[str, Any] = {} if memory_gib is None else {"memory_gib": memory_gib}
    own |= {"allow_quantization": True} if allow_quantization else {}
    if own and is_config(name):
        raise ValueError(f"--memory and --allow-quantization are for a model, and {name} is a config: change it")
    if is_config(name):
        if num_ranks is not None:
            raise ValueError(f"--ranks is for a model, and {name} is a config: change num_ranks in it")
        return load_config(name)
    if num_ranks is not None and num_ranks < 1:
        raise ValueError(f"--ranks is {num_ranks}; it must be at least 1")
    source = _source(name)
    import torch  # takes two seconds, which a config does not need

    num_gpus = torch.cuda.device_count()
    if num_gpus:
        return _on_gpus(source, num_ranks or num_gpus, own)
    gang = {"num_ranks": num_ranks or 1, "cpus_per_rank": 0.2, "engine": "torch", "strategy": "auto"}
    return _config(source, {"stages": "together", "denoiser": gang} | own)


def to_yaml(config: ServeConfig) -> str:
    """Return ``config`` as a config file, without keys that have their default values."""
    written = config.model_dump(mode="json", exclude_defaults=True)
    for model, own in zip(written["applications"][0]["args"]["models"], config.app.models, strict=True):
        model["denoiser"] = {"num_ranks": own.denoiser.num_ranks} | model.get("denoiser", {})
    http = config.http_options
    written["http_options"] = {"host": http.host, "port": http.port} | written["http_options"]
    (application,) = written["applications"]
    whole = config.applications[0]
    fixed = {"name": whole.name, "route_prefix": whole.route_prefix, "import_path": whole.import_path}
    written = {"proxy_location": config.proxy_location, **written, "applications": [fixed | application]}
    return yaml.safe_dump(written, sort_keys=False, allow_unicode=True, width=120)


def _source(name: str) -> str:
    """Return the ``path`` of the model ``name``, with folders and files as absolute paths.

    ValueError if there is no such model.
    """
    try:
        model = ModelSource.parse(name)
        own = {field: getattr(model, field) for field in ("base", "file", "network", "upsampler")}
        model = replace(
            model, **{field: os.path.abspath(place) for field, place in own.items() if os.path.exists(place)}
        )
        if not Path(model.base).is_dir() and not (SHIPPED / model.base).is_dir():
            model = replace(model, base=hub_id_of(model.base))
    except ValueError as error:
        problem = f"{name} is neither a file nor a shipped config ({shipped_configs()}), nor a model"
        raise ValueError(f"{problem}: {error}") from error
    return str(model)


def _on_gpus(source: str, num_ranks: int, own: dict[str, Any]) -> ServeConfig:
    """Return the settings of the shipped GPU configs, without decoder options that the model does not support.

    ``own`` are further keys of the model.
    """
    path, no_options = resolve_configuration(source), {"compiled": False, "limits_memory": False, "num_devices": 1}

    def supports(**options: Any) -> bool:
        return not list(decoder_problems(path, **no_options | options))

    decoder: dict[str, Any] = {"num_cpus": 1, "num_gpus": 0.1, "num_threads": 4}
    if supports(compiled=True):
        decoder["compile"] = True
    if supports(limits_memory=True):
        decoder["memory_gib"] = usual_limit_gib(num_ranks)
    from pipelines.checkpoint import Checkpoint

    defaults = Checkpoint.of_configuration(source).defaults
    if num_ranks > 1 and supports(num_devices=2):
        decoder["num_devices"] = _num_decoding(defaults, num_ranks)
    encoder = {"num_cpus": 1, "num_gpus": 0.1, "num_threads": 4, "conditionings_mib": 1024, "compile": True}
    gang = {
        "num_ranks": num_ranks,
        "cpus_per_rank": 2,
        "gpus_per_rank": 0.8,
        "threads_per_rank": 4,
        "engine": "torch",
        "strategy": "auto",
        "warm_sizes": [f"{defaults.width}x{defaults.height}"],
        "step_deadline_s": REFERENCES_DEADLINE_S if defaults.needs_source else STEP_DEADLINE_S,
        "ping_deadline_s": 2.5,
        "start_deadline_s": START_DEADLINE_S,
    }
    stages = {"text_encoder": encoder, "decoder": decoder, "denoiser": gang}
    return _config(source, {"dtype": "bfloat16", **stages, **own})


def _num_decoding(defaults: Defaults, num_ranks: int) -> int:
    """Return the number of GPUs that decode together: two for a picture, for a clip all with enough rows."""
    if defaults.kind == "image":
        return 2
    from pipelines.vae.chunks import num_bands

    return min(num_ranks, max(2, num_bands(defaults.height)))


def _config(source: str, model: dict[str, Any]) -> ServeConfig:
    name = ModelSource.parse(source)
    title = Path(name.file).stem if name.file else Path(name.base).resolve().name
    own: dict[str, Any] = {"name": _name(f"{title}-{name.workflow}" if name.workflow else title)}
    own |= {"path": name.file, "base": name.base} if name.file else {"path": name.base}
    own |= {name.part.kind: name.part.place} if name.part else {}
    own |= {"workflow": name.workflow} if name.workflow else {}
    application = {
        "name": "troupe",
        "route_prefix": "/",
        "import_path": "deployments.app:build_app",
        "args": {"models": [own | model]},
    }
    return parse_config({"http_options": {"host": "127.0.0.1", "port": 8000}, "applications": [application]})


def _name(text: str) -> str:
    """Return ``text`` as a model's name, with dashes for characters that are not allowed."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("-._") or "model"
