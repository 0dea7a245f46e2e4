"""A stand-in for a pipeline's transformer: it records its calls, or returns given answers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from pipelines.models.generic.outline import empty

Call = tuple[str, Mapping[str, Any]]
"""The component that was called, and its keyword arguments."""


@dataclass(slots=True)
class Exchange:
    """Calls and answers of all stand-ins of a pipeline, in order."""

    calls: list[Call] = field(default_factory=list)
    """Recorded calls of one pass over a step."""
    earlier: list[Any] = field(default_factory=list)
    """Answers to the calls before the recorded ones."""
    answers: list[Any] | None = None
    """Answers of the second pass, in the order of its calls."""


class RecordingTransformer:
    """Replaces the component ``name``: it has the configuration and methods of its class, and no weights.

    While it records, it returns ``blank(call)``, with a prediction's shape. ``parts`` are submodules without weights
    that blocks use.
    """

    def __init__(
        self,
        name: str,
        module: type[Any],
        config: Any,
        device: torch.device,
        dtype: torch.dtype,
        blank: Any,
        parts: Mapping[str, Any],
    ) -> None:
        self.name, self.config, self.device, self.dtype = name, config, device, dtype
        self._class, self._blank, self._parts = module, blank, parts
        self._outlines: list[Any] = []
        self.exchange = Exchange()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_outlines" not in self.__dict__:  # during copy or unpickling
            raise AttributeError(name)
        if name in self._parts:
            return self._parts[name]
        if hasattr(self._class, name):
            return getattr(self._class, name)
        if name.startswith("_"):  # hooks that are looked up at every step
            raise AttributeError(name)
        if not self._outlines:  # for blocks that read sizes from a layer, not the configuration
            self._outlines.append(empty(self._class, self.config))
        return getattr(self._outlines[0], name)

    def __call__(self, *args: Any, **call: Any) -> Any:
        if args:
            names = list(inspect.signature(self._class.forward).parameters)[1:]
            call = {**dict(zip(names, args, strict=False)), **call}
        call.pop("return_dict", None)
        if self.exchange.earlier:
            return self.exchange.earlier.pop(0)
        if self.exchange.answers is not None:
            return self.exchange.answers.pop(0)
        self.exchange.calls.append((self.name, call))
        return self._blank(self.config, call)

    def __copy__(self) -> RecordingTransformer:
        copied = RecordingTransformer(
            self.name, self._class, self.config, self.device, self.dtype, self._blank, self._parts
        )
        copied._outlines = self._outlines
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the name only: a job's state is given another stand-in before it is used again."""
        return (str, (self.name,))

    def cache_context(self, name: str, **step: Any) -> Any:
        return nullcontext()
