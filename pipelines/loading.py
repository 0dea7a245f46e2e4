"""Resolve a configured source (folder, shipped checkpoint, hub id) to a folder, and a dtype by name."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.control_network import UPSAMPLER, UPSAMPLER_FOLDER, SeparatePart, joined_folder, split_network
from pipelines.directory import CLASSIC_INDEX, MODULAR_INDEX, repositories
from pipelines.models.registry import spec_of
from pipelines.single_file import split_source
from pipelines.workflow import split_workflow, unused_folders, workflow_folder

if TYPE_CHECKING:
    import torch

SHIPPED = Path(__file__).parent / "checkpoints"
PUBLISHED = Path(__file__).parent / "published"
"""Configurations of published models, without weights: one folder each."""
HUB_IDS = Path(__file__).parent / "published_hubs.json"
"""Hub ids of published models."""
DTYPES = ("float32", "bfloat16", "float16")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
TOP_FILES = [CLASSIC_INDEX, MODULAR_INDEX, "troupe.json"]
PART_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
HUB_FILES = [*TOP_FILES, *(f"*/{pattern}" for pattern in PART_FILES)]
"""Files of the diffusers layout: hub repositories often repeat the weights as one large file at the top."""
CONFIGURATION_FILES = [pattern for pattern in HUB_FILES if not pattern.endswith(".safetensors")]


def resolve_path(source: str, *, weights: bool = True) -> Path:
    """Return the diffusers directory of ``source``: a folder, the name of a shipped checkpoint, or a hub id.

    A hub id is downloaded (or found in the hub cache), with ``weights`` if requested, but for parts that no request
    needs. So are parts that a modular index
    places elsewhere. A single file (``single_file``) resolves to its base. A model with a separate control network
    (``control_network``) resolves to a folder of both, and one for a ``workflow`` to a folder without what that leaves
    out. ValueError says what to change.
    """
    source, part = split_network(source)
    if part:
        return joined_folder(resolve_path(source, weights=weights), _resolve_part(part, weights=weights), part.kind)
    _, source = split_source(source)
    source, workflow = split_workflow(source)
    if workflow:
        return _resolve_workflow(source, workflow, weights=weights)
    if Path(source).is_dir():
        return _with_parts(Path(source), weights=weights)
    if (SHIPPED / source).is_dir():
        return SHIPPED / source
    if _HUB_ID.fullmatch(source):
        path = _download(source, CONFIGURATION_FILES)
        if weights:
            path = _download(source, HUB_FILES, but=unused_weights(path))
        return _with_parts(path, weights=weights)
    raise ValueError(f"no model {source!r}: give a diffusers folder, a hub id like owner/name, or {_shipped_names()}")


def _resolve_workflow(source: str, workflow: str, *, weights: bool) -> Path:
    """Return the folder for a workflow, without a download of the weights that it leaves out."""
    path = Path(source) if Path(source).is_dir() else resolve_path(source, weights=False)
    if weights and not Path(source).is_dir() and _HUB_ID.fullmatch(source):
        path = _download(source, HUB_FILES, but=[f"{folder}/*" for folder in unused_folders(path, workflow)])
    return _with_parts(workflow_folder(path, workflow), weights=weights)


def _resolve_part(part: SeparatePart, *, weights: bool) -> Path:
    if Path(part.place).is_dir():
        return Path(part.place)
    if _HUB_ID.fullmatch(part.place):
        files = [pattern for pattern in PART_FILES if weights or not pattern.endswith(".safetensors")]
        inner = [f"{UPSAMPLER_FOLDER}/{pattern}" for pattern in files] if part.kind == UPSAMPLER else []
        return _download(part.place, files + inner)
    raise ValueError(f"no {part.kind} {part.place!r}: give a folder of diffusers, or a hub id like owner/name")


def resolve_configuration(source: str) -> Path:
    """Return a directory with the configuration files of ``source``; weights are not needed.

    ``source`` is a folder, a shipped checkpoint, a hub id, or a published model's name ("Wan2.1-T2V-14B", in any case).
    ValueError as for ``resolve_path``.
    """
    source, part = split_network(source)
    if part:
        return joined_folder(resolve_configuration(source), _resolve_part(part, weights=False), part.kind)
    _, source = split_source(source)
    source, workflow = split_workflow(source)
    if workflow:
        return workflow_folder(resolve_configuration(source), workflow)
    name = source.rsplit("/", 1)[-1].lower().replace("-diffusers", "")
    names = {model.lower(): model for model in published_models()}
    if name in names and not Path(source).is_dir():
        return PUBLISHED / names[name]
    try:
        return resolve_path(source, weights=False)
    except ValueError as error:
        raise ValueError(f"{error}; or the name of a published model: {', '.join(published_models())}") from error


def hub_id_of(source: str) -> str:
    """Return the hub id of a published model by its name, in any case; a hub id is returned as it is.

    ValueError for other names.
    """
    if _HUB_ID.fullmatch(source):
        return source
    names: dict[str, str] = json.loads(HUB_IDS.read_text())
    for name, hub_id in names.items():
        if name.lower() == source.lower():
            return hub_id
    raise ValueError(
        f"no model {source!r}: give a diffusers folder, a hub id like owner/name, {_shipped_names()}, or the name of "
        f"a published model: {', '.join(names)}"
    )


def published_models() -> tuple[str, ...]:
    """Return the names of models whose configurations ship with the project."""
    return tuple(sorted(path.name for path in PUBLISHED.iterdir()))


def shipped_checkpoints() -> tuple[str, ...]:
    """Return the names of the small trained models that ship with the project."""
    return tuple(sorted(path.parent.name for path in SHIPPED.glob(f"*/{CLASSIC_INDEX}")))


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of ``name`` on ``device``; "auto" is bfloat16 on a GPU and float32 on the CPU."""
    import torch

    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}; known: auto, {', '.join(DTYPES)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _shipped_names() -> str:
    return "one of " + ", ".join(shipped_checkpoints()) if shipped_checkpoints() else "a shipped checkpoint"


def _with_parts(path: Path, *, weights: bool) -> Path:
    """Return ``path``, after downloading the parts that its index places in repositories of the hub."""
    kinds = [kind for kind in PART_FILES if weights or not kind.endswith(".safetensors")]
    folders: dict[str, list[str]] = {}
    for repository, folder in repositories(path):
        folders.setdefault(repository, []).extend(f"{folder}/{kind}".lstrip("/") for kind in kinds)
    for repository, patterns in folders.items():
        _download(repository, list(dict.fromkeys(patterns)))
    return path


def unused_weights(path: Path) -> list[str]:
    """Return the weights of parts that no request needs, as patterns; none of a folder that cannot be served."""
    try:
        return [f"{part}/*.safetensors" for part in spec_of(path).unused_parts(path)]
    except ValueError:  # the same error comes where the folder is opened
        return []


def _download(hub_id: str, files: list[str], *, but: Sequence[str] = ()) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        fetch = partial(snapshot_download, ignore_patterns=but) if but else snapshot_download
        return Path(fetch(hub_id, allow_patterns=files))
    except (OfflineModeIsEnabled, LocalEntryNotFoundError) as error:
        raise ValueError(
            f"{hub_id!r} is not a folder here, and not in the hub cache, and the hub cannot be reached: unset "
            f"HF_HUB_OFFLINE, or run `hf download {hub_id}` where there is a network, or give the path of a folder"
        ) from error
    except HfHubHTTPError as error:
        raise ValueError(
            f"the hub refused {hub_id!r} ({error}): check the name; for a gated model accept its terms on its page and "
            "set HF_TOKEN"
        ) from error


def local_path(source: str) -> Path:
    """Return the file or folder of ``source``, perhaps a shipped checkpoint's; a hub id's does not exist."""
    return SHIPPED / source if not Path(source).exists() and (SHIPPED / source).is_dir() else Path(source)


def resolve_file(source: str, name: str, usual: tuple[str, ...], *, beside: tuple[str, ...] = ()) -> Path:
    """Return the safetensors file of ``source``: itself, or ``name`` in a folder, a shipped checkpoint or a hub id.

    Without a ``name``, return one of the ``usual`` names or the only file. Files ``beside`` it are downloaded as well.
    ValueError lists the files.
    """
    path = local_path(source)
    if path.is_file():
        return path
    if not path.is_dir():
        if not _HUB_ID.fullmatch(source):
            raise ValueError(
                f"no adapter {source!r}: give a safetensors file, a folder, a hub id like owner/name, or "
                f"{_shipped_names()}"
            )
        path = _download(source, [*((name,) if name else usual), *beside])
    if name and (path / name).is_file():
        return path / name
    here = sorted(file.name for file in path.glob("*.safetensors"))
    fitting = [one for one in usual if one in here] or here
    if name or not fitting or (len(fitting) > 1 and fitting[0] not in usual):
        raise ValueError(f"which file of {source!r} is meant? Say file: NAME; there are: {', '.join(here) or 'none'}")
    return path / fitting[0]
