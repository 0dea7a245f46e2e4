"""Resolve a configured source (folder, shipped checkpoint, hub id) to a folder, and a dtype by name."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.control_network import PART, UPSAMPLER, UPSAMPLER_FOLDER, SeparatePart, joined_folder
from pipelines.directory import CLASSIC_INDEX, MODULAR_INDEX, SHOWN, repositories
from pipelines.models.registry import spec_of
from pipelines.single_file import split_source, with_base
from pipelines.workflow import unused_folders, workflow_folder

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
WORKFLOW = "+workflow@"
"""Mark in a model's name, before its workflow."""
_SEPARATE = re.compile(rf"\+({PART}|{UPSAMPLER})@")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """A model's name by its parts: ``FILE@BASE+workflow@WORKFLOW+controlnet@NETWORK``, all but ``BASE`` optional.

    It ends with ``+upsampler@UPSAMPLER`` in place of a control network for models with a latent upsampler.
    """

    base: str
    """Folder, shipped checkpoint or hub id; where only a configuration is read, also a published model's name."""
    file: str = ""
    """Path of a single-file transformer (``single_file``) that replaces the base's; empty: the base's own."""
    workflow: str = ""
    """Use of the base with another of its transformers (``workflow``); empty: its usual one."""
    network: str = ""
    """Folder or hub id of a control network (``control_network``); empty: none besides what the base has."""
    upsampler: str = ""
    """The same of a latent upsampler."""

    @classmethod
    def parse(cls, name: str) -> ModelSource:
        """Return the parts of ``name``. ValueError if a file in it has no base, or cannot be read."""
        model, *apart = _SEPARATE.split(name, maxsplit=1)
        parts = dict.fromkeys(apart[:1], apart[-1] if apart else "")
        file, model = split_source(model)
        base, _, workflow = model.partition(WORKFLOW)
        apart_from_it = {"network": parts.get(PART, ""), "upsampler": parts.get(UPSAMPLER, "")}
        return cls(base=base, file=str(file or ""), workflow=workflow, **apart_from_it)

    def __str__(self) -> str:
        """Return the name. ValueError if the file is not a safetensors or GGUF file."""
        name = with_base(self.file, self.base) if self.file else self.base
        name = f"{name}{WORKFLOW}{self.workflow}" if self.workflow else name
        return f"{name}+{self.part.kind}@{self.part.place}" if self.part else name

    @property
    def part(self) -> SeparatePart | None:
        """The part that is stored apart from the base; None without one."""
        if self.upsampler:
            return SeparatePart(self.upsampler, UPSAMPLER)
        return SeparatePart(self.network) if self.network else None


def resolve_path(source: str, *, weights: bool = True) -> Path:
    """Return the diffusers directory of ``source``: a folder, the name of a shipped checkpoint, or a hub id.

    A hub id is downloaded (or found in the hub cache), with ``weights`` if requested, but for parts that no request
    needs. So are parts that a modular index places elsewhere. A single file resolves to its base. A model with a
    separate control network resolves to a folder of both, one for a workflow to a folder of the parts that it needs
    (see ``ModelSource``). ValueError says what to change.
    """
    model = ModelSource.parse(source)
    return _with_part(_resolve_model(model, weights=weights), model.part, weights=weights)


def _resolve_model(model: ModelSource, *, weights: bool) -> Path:
    """Return the folder of a model without a part that is stored apart."""
    if model.workflow:
        return _resolve_workflow(model.base, model.workflow, weights=weights)
    source = model.base
    if Path(source).is_dir():
        is_model = any((Path(source) / index).is_file() for index in (CLASSIC_INDEX, MODULAR_INDEX))
        if not is_model and (snapshots := sorted(Path(source).glob("snapshots/*"))):
            raise ValueError(f"{source} is the hub cache's folder of all revisions: give one of them, {snapshots[0]}")
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


def _with_part(path: Path, part: SeparatePart | None, *, weights: bool) -> Path:
    return path if part is None else joined_folder(path, _resolve_part(part, weights=weights), part.kind)


def _resolve_part(part: SeparatePart, *, weights: bool) -> Path:
    if Path(part.place).is_dir():
        return Path(part.place)
    if _HUB_ID.fullmatch(part.place):
        files = [pattern for pattern in PART_FILES if weights or not pattern.endswith(".safetensors")]
        if part.kind == UPSAMPLER:  # "*.safetensors" matches those of all folders: of a pipeline or a whole model
            path = _download(part.place, [f"{UPSAMPLER_FOLDER}/{pattern}" for pattern in files])
            if (path / UPSAMPLER_FOLDER).is_dir():
                return path
        return _download(part.place, files)
    raise ValueError(f"no {part.kind} {part.place!r}: give a folder of diffusers, or a hub id like owner/name")


def resolve_configuration(source: str) -> Path:
    """Return a directory with the configuration files of ``source``; weights are not needed.

    ``source`` is a folder, a shipped checkpoint, a hub id, or a published model's name ("Wan2.1-T2V-14B", in any case).
    ValueError as for ``resolve_path``.
    """
    model = ModelSource.parse(source)
    path = _base_configuration(model.base)
    path = workflow_folder(path, model.workflow) if model.workflow else path
    return _with_part(path, model.part, weights=False)


def _base_configuration(source: str) -> Path:
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
    if known := [name for name in published_models() if name.lower() == source.lower()]:
        raise ValueError(f"{known[0]} is known by its configuration alone: give its hub id, owner/name, or its folder")
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
    here = sorted(file.name for file in path.glob(f"{SHOWN}.safetensors"))
    fitting = [one for one in usual if one in here] or here
    if name or not fitting or (len(fitting) > 1 and fitting[0] not in usual):
        known = ", ".join(here) or "none"
        place = "Add its name to the path, or say file: NAME in a configuration"
        raise ValueError(f"which file of {source!r} is meant? {place}; there are: {known}")
    return path / fitting[0]
