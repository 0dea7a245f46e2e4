"""Compiled kernels that nodes share: a new node neither compiles nor chooses among kernels again.

``TROUPE_KERNEL_CACHE`` names a folder that all nodes see, or object storage (``s3://bucket/prefix``). A process stores
its compiled kernels and the kernels that were chosen by time, so all nodes give the same bytes. Kernels are those of
``torch.compile``, and on GPUs the plain ones in Triton with the C libraries that launch them. In a folder, gangs share
their decisions on strategies too. Write access to it allows running code on all nodes that read it.
"""

from __future__ import annotations

import io
import logging
import platform
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from zipfile import ZIP_DEFLATED, ZipFile

from deployments.model_config import ModelConfig
from deployments.settings import Settings
from deployments.stages.measured_times import FACTORS, software_facts
from engines.core.logs import timed
from engines.core.storage import device_name, facts_digest, write_atomically, write_once
from engines.fast.triton_cache import Entries, has_triton, read_entry, recorded_entries

if TYPE_CHECKING:
    from deployments.clips.objects import Bucket

KERNELS, STRATEGIES = "kernels", "strategies"
COMPILED, TRITON = "torch_compile", "triton"
"""Names in a bundle: a file, and the folder of entries."""

logger = logging.getLogger(__name__)


class FolderStore:
    """Files below ``folder``, read and written as objects of a ``Bucket`` are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        write_atomically(self.folder / name, data)


def shared_store() -> FolderStore | Bucket | None:
    """Return the store of ``TROUPE_KERNEL_CACHE``; None if that is not set."""
    place = Settings().kernel_cache
    if "://" not in place:
        return FolderStore(Path(place)) if place else None
    from deployments.clips.objects import Bucket  # with SQLAlchemy

    return Bucket(place)


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelBundle:
    """Kernels that one process has compiled. The store has them as a zip file."""

    compiled: bytes | None = None
    """Result of ``torch.compiler.save_cache_artifacts``; None if PyTorch has compiled nothing."""
    triton: Entries
    """Entries of Triton's cache."""

    @classmethod
    def of_bytes(cls, data: bytes) -> KernelBundle:
        """Return the bundle of a file in the store. BadZipFile if it is none."""
        entries: dict[str, dict[str, bytes]] = {}
        with ZipFile(io.BytesIO(data)) as file:
            names = file.namelist()
            for folder, key, name in (one.split("/") for one in names if one != COMPILED):
                entries.setdefault(key, {})[name] = file.read(f"{folder}/{key}/{name}")
            return cls(compiled=file.read(COMPILED) if COMPILED in names else None, triton=entries)

    def to_bytes(self) -> bytes:
        data = io.BytesIO()
        with ZipFile(data, "w", ZIP_DEFLATED, compresslevel=1) as file:
            if self.compiled is not None:
                file.writestr(COMPILED, self.compiled)
            for key, files in self.triton.items():
                for name, content in files.items():
                    file.writestr(f"{TRITON}/{key}/{name}", content)
        return data.getvalue()


@contextmanager
def shared_kernels(model: ModelConfig, part: str, device: str) -> Iterator[None]:
    """Compile inside the block with the kernels of the store, and store those of ``part`` that it lacks.

    A broken bundle is replaced. Without a store, or if it fails, this process compiles for itself and stores nothing:
    it might replace the choices of other nodes.
    """
    store, name, data = shared_store(), "", None
    if store is not None:
        name = f"{KERNELS}/{model.name}_{part}_{facts_digest(_facts(model, part, device))}.zip"
        store, data = _read(store, name)
    if store is None:
        yield
        return
    bundle = None if data is None else _load(data, name)
    with _recorded_entries(bundle.triton if bundle else {}, device) as folders:
        yield
    _save(store, name, bundle or KernelBundle(triton={}), folders, replaces=data is not None)


@contextmanager
def _recorded_entries(known: Entries, device: str) -> Iterator[set[Path]]:
    """Yield the folders of what Triton looks up, with the ``known`` entries at hand. None on CPUs or if that fails."""
    folders: set[Path] = set()
    with ExitStack() as stack:
        if device != "cpu" and has_triton():
            try:
                folders = stack.enter_context(recorded_entries(known))
            except Exception as error:  # another version of Triton
                logger.warning("kernels of Triton are not shared with other nodes: %s", error)
        yield folders


def stage_kernels(
    model: ModelConfig, part: Literal["text_encoder", "decoder"], device: str
) -> AbstractContextManager[None]:
    """Return ``shared_kernels`` for an encoder or a decoder that compiles any.

    With ``compile`` both do on the CPU. On a GPU they are captured, and norms of decoders are kernels in Triton.
    """
    compiles = device == "cpu" or (part == "decoder" and has_triton())
    return shared_kernels(model, part, device) if getattr(model, part).compile and compiles else nullcontext()


def _facts(model: ModelConfig, part: str, device: str) -> Mapping[str, str]:
    stages = (model.stages, model.text_encoder.compile, model.decoder.compile)
    decoding = (model.decoder.memory_gib, model.decoder.num_devices)
    steps = {name: getattr(model.denoiser, name) for name in (*FACTORS, "elastic", "load", "warm_sizes")}
    second_passes = [one.second_stage_sigmas for one in model.recipes.values()]
    additions = (model.adapters, model.runtime_loras is not None, model.attentions, second_passes)
    return {
        "model": repr([model.source, model.dtype]),
        "settings": repr([stages, decoding, steps, additions]),  # each compiles other kernels
        "part": part,
        "device": device_name(device),
        "python": platform.python_version(),
        **software_facts(),
    }


def _read(store: FolderStore | Bucket, name: str) -> tuple[FolderStore | Bucket | None, bytes | None]:
    """Return the store, None if it fails, and the bundle in it as bytes, None if there is none."""
    try:
        return store, store.read(name)
    except FileNotFoundError:
        return store, None
    except Exception as error:  # a provider's client
        _warn_unread(name, error)
        return None, None


def _load(data: bytes, name: str) -> KernelBundle | None:
    """Give PyTorch the kernels of a bundle. Return the bundle, None if it cannot be read."""
    try:
        with timed("kernels: load"):
            bundle = KernelBundle.of_bytes(data)
            if bundle.compiled is not None:
                from engines.core.torch_private import load_compiled  # torch, which the replica of a gang does without

                load_compiled(bundle.compiled)
    except Exception as error:  # not a zip file, or one that PyTorch does not read
        _warn_unread(name, error)
        return None
    return bundle


def _warn_unread(name: str, error: Exception) -> None:
    logger.warning("compiled kernels of other nodes cannot be read: %s", error, extra={"kernels": name})


def _save(
    store: FolderStore | Bucket, name: str, known: KernelBundle, folders: Iterable[Path], *, replaces: bool
) -> None:
    """Store ``known`` with what it lacks, if anything: PyTorch's kernels, and entries of Triton's cache in ``folders``.

    PyTorch's kernels stay as they are known: they include choices by time. One of several concurrent writers wins, in
    a folder the first. A later start adds the entries of the others.
    """
    import torch

    try:
        made = torch.compiler.save_cache_artifacts() if known.compiled is None else None
        lacking = sorted(folder for folder in set(folders) if folder.name not in known.triton)
        entries = {folder.name: files for folder in lacking if (files := read_entry(folder))}
        if made is None and not entries:
            return
        compiled = known.compiled if made is None else made[0]
        data = KernelBundle(compiled=compiled, triton={**known.triton, **entries}).to_bytes()
        if replaces or not isinstance(store, FolderStore):
            store.write(name, data)
        elif not write_once(store.folder / name, data):
            return
        facts = {"kernels": name, "num_bytes": len(data), "num_triton": len(entries)}
        logger.info("compiled kernels are stored", extra=facts)
    except Exception as error:
        logger.warning("compiled kernels cannot be stored for other nodes: %s", error, extra={"kernels": name})


def strategies_folder() -> Path:
    """Return the folder of gangs' decisions on strategies: the shared one, or this node's with object storage."""
    store = shared_store()
    return (store.folder if isinstance(store, FolderStore) else Settings().data_dir) / STRATEGIES
