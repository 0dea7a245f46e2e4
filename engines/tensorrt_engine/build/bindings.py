"""The one place that knows which TensorRT is installed: ``tensorrt``, else TensorRT-RTX (CI builds with it)."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any

INSTALL_HINT = "install TensorRT 11 (`pip install '.[gpu]'`) or TensorRT-RTX (`pip install '.[rtx]'`)"


class TensorRTMissingError(RuntimeError):
    """No TensorRT is installed in this Python."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bindings:
    """The Python module of a TensorRT product and what the key of a cached engine must know of it."""

    module: ModuleType
    product: str
    version: str

    @property
    def api(self) -> Any:
        """The module, untyped: neither product ships complete type information."""
        return self.module


@functools.cache
def load_bindings() -> Bindings:
    """Returns ``tensorrt`` where it is installed (it runs engines on data-centre GPUs), TensorRT-RTX otherwise.

    Raises TensorRTMissingError when neither can be imported.
    """
    failures = []
    for name, product in (("tensorrt", "tensorrt"), ("tensorrt_rtx_bindings", "tensorrt_rtx")):
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            failures.append(f"{name}: {error}")
            continue
        return Bindings(module=module, product=product, version=str(module.__version__))
    raise TensorRTMissingError(f"no TensorRT found ({'; '.join(failures)}); {INSTALL_HINT}")
