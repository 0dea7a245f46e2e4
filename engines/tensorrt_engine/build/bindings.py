"""The installed TensorRT (``tensorrt``, else TensorRT-RTX), its messages, and its target GPUs."""

from __future__ import annotations

import functools
import importlib
import logging
from dataclasses import dataclass
from types import ModuleType
from typing import Any

INSTALL_HINT = "install TensorRT 11 (`pip install '.[gpu]'`) or TensorRT-RTX (`pip install '.[rtx]'`)"


class TensorRTMissingError(RuntimeError):
    """No TensorRT is installed in this Python."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bindings:
    """The Python module of a TensorRT product."""

    module: ModuleType
    """Imported module."""
    product: str
    """Name of the product; part of an engine's cache key."""
    version: str
    """Its version; part of an engine's cache key."""

    @property
    def api(self) -> Any:
        """The module, untyped: neither product ships complete type information."""
        return self.module


@functools.cache
def load_bindings() -> Bindings:
    """Return ``tensorrt`` if installed (it runs engines on data-centre GPUs), TensorRT-RTX otherwise.

    Raises TensorRTMissingError if neither can be imported.
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


logger = logging.getLogger("troupe.tensorrt")


@functools.cache
def _logger_class() -> type:
    trt = load_bindings().api
    failures = (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR)

    class ErrorCollector(trt.ILogger):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in failures:
                self.errors.append(message)
            if severity != trt.ILogger.VERBOSE:  # a build has hundreds of warnings, none actionable for a user
                logger.debug("%s", message)

    return ErrorCollector


@functools.cache
def trt_logger() -> Any:
    """Return the process's only ``ILogger`` (TensorRT ignores a second); its ``errors`` collects error messages."""
    return _logger_class()()


def take_errors() -> str:
    """Return the error messages since the last call, as one line."""
    errors = trt_logger().errors
    text = "; ".join(dict.fromkeys(errors)).strip()
    errors.clear()
    return text


_MULTI_DEVICE = (8, 0)
_FP8 = (8, 9)
_NATIVE_RING = (10, 0)


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Target:
    """Compute capability that an engine file is built for, and the only one that it runs on."""

    major: int
    """9 for compute capability 9.0."""
    minor: int
    """0 for compute capability 9.0."""

    def __post_init__(self) -> None:
        if (self.major, self.minor) < _MULTI_DEVICE:
            raise ValueError(f"target {self.name}: multi-device engines need compute capability 8.0 or later")

    @classmethod
    def parse(cls, text: str) -> Target:
        """Parse "sm89", "SM120", "8.9" or "12.0"."""
        digits = text.lower().removeprefix("sm").replace(".", "")
        if not (digits.isdecimal() and 2 <= len(digits) <= 3):
            raise ValueError(f"target {text!r} is no compute capability: write it as sm80, sm89, sm90, sm100 or sm120")
        return cls(major=int(digits[:-1]), minor=int(digits[-1]))

    @property
    def name(self) -> str:
        return f"sm{self.major}{self.minor}"

    @property
    def has_fp8(self) -> bool:
        return (self.major, self.minor) >= _FP8

    @property
    def has_native_ring(self) -> bool:
        """True if attention may span devices inside the engine (``IAttention.num_ranks``, TensorRT 11)."""
        return (self.major, self.minor) >= _NATIVE_RING
