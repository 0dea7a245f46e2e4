"""Compiled kernels that nodes share: a new node neither compiles nor chooses among kernels again.

``TROUPE_KERNEL_CACHE`` names a folder that all nodes see, or object storage (``s3://bucket/prefix``). A process stores
its compiled kernels and the kernels that were chosen by time, so all nodes give the same bytes. In a folder, gangs
share their decisions on strategies too. Write access to it allows running code on all nodes that read it.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Literal, Protocol

from deployments.model_config import ModelConfig
from deployments.settings import Settings
from deployments.stages.measured_times import FACTORS, software_facts
from engines.core.logs import timed
from engines.core.storage import device_name, facts_digest, write_once

KERNELS, STRATEGIES = "kernels", "strategies"

logger = logging.getLogger(__name__)


class Store(Protocol):
    def read(self, name: str) -> bytes:
        """Return the content of ``name``. FileNotFoundError if it is not there."""

    def write(self, name: str, data: bytes) -> None: ...


class FolderStore:
    """Files below ``folder``. The first of several writers of a name wins."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        write_once(self.folder / name, data)


def shared_store() -> Store | None:
    """Return the store of ``TROUPE_KERNEL_CACHE``; None if that is not set."""
    place = Settings().kernel_cache
    if not place:
        return None
    if "://" not in place:
        return FolderStore(Path(place))
    from deployments.clips.objects import Bucket

    return Bucket(place)


@contextmanager
def shared_kernels(model: ModelConfig, part: str, device: str) -> Iterator[None]:
    """Compile inside the block with the kernels of the store, and store them if it has none of ``part``.

    Without a store, or if it fails, this process compiles for itself.
    """
    store = shared_store()
    if store is None:
        yield
        return
    name = f"{KERNELS}/{model.name}_{part}_{facts_digest(_facts(model, part, device))}"
    is_known = _load(store, name)
    yield
    if not is_known:
        _save(store, name)


def stage_kernels(
    model: ModelConfig, part: Literal["text_encoder", "decoder"], device: str
) -> AbstractContextManager[None]:
    """Return ``shared_kernels`` for an encoder or a decoder that compiles any: with ``compile``, on the CPU."""
    compiles = getattr(model, part).compile and device == "cpu"
    return shared_kernels(model, part, device) if compiles else nullcontext()


def _facts(model: ModelConfig, part: str, device: str) -> Mapping[str, str]:
    stages = (model.stages, model.text_encoder.compile, model.decoder.compile)
    decoding = (model.decoder.memory_gib, model.decoder.num_devices)
    steps = {name: getattr(model.denoiser, name) for name in (*FACTORS, "elastic", "warm_sizes")}
    return {
        "model": repr([model.source, model.dtype]),
        "settings": repr([stages, decoding, steps]),  # each compiles other kernels
        "part": part,
        "device": device_name(device),
        "python": platform.python_version(),
        **software_facts(),
    }


def _load(store: Store, name: str) -> bool:
    """Give PyTorch the kernels of the store. Return whether it has some."""
    from engines.core.torch_private import load_compiled  # torch, which the replica of a gang does without

    try:
        bundle = store.read(name)
        with timed("kernels: load"):
            load_compiled(bundle)
    except FileNotFoundError:
        return False
    except Exception as error:  # a provider's client, or a bundle that PyTorch does not read
        logger.warning("compiled kernels of other nodes cannot be read: %s", error, extra={"kernels": name})
        return False
    return True


def _save(store: Store, name: str) -> None:
    import torch

    try:
        made = torch.compiler.save_cache_artifacts()
        if made is not None:
            store.write(name, made[0])
            logger.info("compiled kernels are stored", extra={"kernels": name, "num_bytes": len(made[0])})
    except Exception as error:
        logger.warning("compiled kernels cannot be stored for other nodes: %s", error, extra={"kernels": name})


def strategies_folder() -> Path:
    """Return the folder of gangs' decisions on strategies: the shared one, or this node's with object storage."""
    store = shared_store()
    return (store.folder if isinstance(store, FolderStore) else Settings().data_dir) / STRATEGIES
