"""Adapters that come at run time: read from their folders, held in memory, the least recently used ones dropped."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import ItemsView, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from torch import nn

from engines.core.model import Addition, DenoiserModel
from engines.parallel.copies import weightless_copy
from pipelines.lora.adapter_config import PATTERNS, peft_config, written_config
from pipelines.lora.model import check_linears, read_low_ranks
from pipelines.lora.source import LORA_FILE, PEFT_CONFIG, AdapterError, LoraLimits, LoraSource
from pipelines.lora.translation import shown
from pipelines.request import Lora, MediaRequest

REPEATS = re.compile(r"[*+?{(]")
"""Repetitions and groups in a regular expression. Several of either may take for ever on some names."""


@dataclass(frozen=True, kw_only=True, slots=True, weakref_slot=True)
class LoadedLora:
    """An adapter in memory."""

    addition: Addition
    """Its additions to the weights, by layer."""
    num_bytes: int
    """Memory of its tensors."""


class LoraCache(Mapping[str, Addition]):
    """A model's additions by name: ``configured`` ones, and the adapters that were used last.

    It is an ``AdditionLoader`` whose sources are ``Lora``. ``modules`` are the transformers by name, of which names and
    shapes of parameters are read. Threads may share it; ``items`` returns a snapshot. An adapter that a request holds
    (``for_request``) can be had by its key even if it is not among those used last.
    """

    def __init__(
        self,
        configured: Mapping[str, Addition],
        modules: Mapping[str, nn.Module],
        pipeline_class: Any,
        limits: LoraLimits,
        *,
        linears_only: bool,
    ) -> None:
        """Create it. ``linears_only``: a hand-ordered step holds copies of all other parameters."""
        self._configured, self._modules, self._pipeline_class = dict(configured), modules, pipeline_class
        self._limits, self._linears_only = limits, linears_only
        self._recent: OrderedDict[str, LoadedLora] = OrderedDict()
        self._alive: WeakValueDictionary[str, LoadedLora] = WeakValueDictionary()
        self._removed: WeakValueDictionary[str, LoadedLora] = WeakValueDictionary()
        """Removed adapters that requests still hold."""
        self._lock, self._reading = threading.RLock(), threading.Lock()

    def __getitem__(self, key: str) -> Addition:
        if key in self._configured:
            return self._configured[key]
        if (loaded := self._find(key)) is None:
            raise KeyError(key)
        return loaded.addition

    def __contains__(self, key: object) -> bool:
        with self._lock:
            return key in self._configured or key in self._alive or key in self._removed

    def __iter__(self) -> Iterator[str]:
        return iter(self._snapshot())

    def __len__(self) -> int:
        return len(self._snapshot())

    def items(self) -> ItemsView[str, Addition]:
        return self._snapshot().items()

    def for_request(self, request: MediaRequest) -> tuple[LoadedLora, ...]:
        """See ``AdditionLoader``."""
        return tuple(self._load(lora) for lora in request.all_loras if lora.folder)

    def load(self, source: Lora) -> int:
        """See ``AdditionLoader``."""
        return self._load(source).num_bytes

    def remove(self, source: Lora) -> None:
        """See ``AdditionLoader``."""
        with self._lock:
            self._recent.pop(source.key, None)
            if (loaded := self._alive.pop(source.key, None)) is not None:
                self._removed[source.key] = loaded

    def _snapshot(self) -> dict[str, Addition]:
        with self._lock:
            return {**self._configured, **{key: loaded.addition for key, loaded in self._recent.items()}}

    def _load(self, lora: Lora) -> LoadedLora:
        if (loaded := self._find(lora.key)) is not None:
            return loaded
        with self._reading:  # one thread reads a file that several need
            if (loaded := self._find(lora.key)) is None:
                loaded = self._read(lora)
                with self._lock:
                    self._alive[lora.key] = loaded
                    self._find(lora.key)
        return loaded

    def _find(self, key: str) -> LoadedLora | None:
        """Return a loaded adapter, which is the last one used now unless it was removed; None if it is not loaded."""
        with self._lock:
            if (loaded := self._alive.get(key)) is None:
                return self._removed.get(key)
            self._recent[key] = loaded
            self._recent.move_to_end(key)
            while len(self._recent) > 1 and self._is_full():
                self._recent.popitem(last=False)
            return loaded

    def _is_full(self) -> bool:
        num_bytes = sum(loaded.num_bytes for loaded in self._recent.values())
        return len(self._recent) > self._limits.max_loaded or num_bytes > self._limits.memory_bytes

    def _read(self, lora: Lora) -> LoadedLora:
        """Read and check a file. AdapterError, without the place of the file, if it does not suit the model."""
        path, part = Path(lora.folder) / LORA_FILE, lora.part or next(iter(self._modules))
        if part not in self._modules:
            raise AdapterError(f"an adapter for part {part!r}: the model has {', '.join(self._modules)}", "part")
        if not path.is_file():
            raise AdapterError(
                f"the adapter {lora.name!r} was deleted, or a rank cannot see the data directory", "file"
            )
        try:
            check_patterns(path)
            source = LoraSource(path=str(path), name=lora.name, part=lora.part)
            limit = self._limits.memory_bytes
            found = read_low_ranks(source, self._modules[part], self._pipeline_class, limit)
            if self._linears_only:
                check_linears(source, self._modules[part], found)
        except ValueError as error:
            message = str(error).replace(str(path), f"the adapter {lora.name!r}")
            raise AdapterError(message, getattr(error, "field", "file")) from None
        except (ArithmeticError, AttributeError, TypeError) as error:  # of a config by a stranger
            message = f"the config of the adapter {lora.name!r} has a value of another kind ({error})"
            raise AdapterError(message, "config" if (path.parent / PEFT_CONFIG).is_file() else "file") from None
        num_bytes = sum(x.nbytes for low_rank in found.values() for x in (low_rank.up_NR, low_rank.down_RK))
        if num_bytes > self._limits.memory_bytes:
            raise AdapterError(
                f"the adapter {lora.name!r} takes {num_bytes / 2**30:.2f} GiB; it must be within the model's "
                f"runtime_loras.memory_gib, which is {self._limits.memory_gib:g}",
                "file",
            )
        return LoadedLora(addition={part: found}, num_bytes=num_bytes)


def with_runtime_loras(model: DenoiserModel, pipeline_class: Any, limits: LoraLimits) -> DenoiserModel:
    """Return ``model``, not quantised yet, with a ``LoraCache`` in place of its additions, which it has as well."""
    outlines = {name: weightless_copy(module) for name, module in model.modules.items()}
    for outline in outlines.values():
        for name in model.unchanged:
            outline.set_submodule(name, nn.Identity())
    cache = LoraCache(model.additions, outlines, pipeline_class, limits, linears_only=model.fast is not None)
    return replace(model, additions=cache, additions_change=True)


def check_patterns(path: Path) -> None:
    """Raise AdapterError for a config that cannot be read, or with patterns whose matching could take for ever."""
    for field, read in (("file", written_config), ("config", peft_config)):
        patterns: list[str] = []
        for name, value in read(path).items():  # in a header they begin with a part's name
            if name.endswith(PATTERNS):
                patterns.extend(value or ())
        if repeating := [pattern for pattern in patterns if REPEATS.search(pattern)]:
            raise AdapterError(
                f"{path} has patterns that repeat or group something ({shown(repeating)}): write names of layers",
                field,
            )
