"""Faster imports of diffusers and transformers, without optional packages that the project does not use.

Imports are most of the start-up time of a process with a small model, and there are many such processes.
"""

from __future__ import annotations

import gc
import importlib
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from engines.core.logs import log_level


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import the libraries in two thirds of the time, at the start of a process.

    Garbage collection is off inside the block, and existing objects are frozen at its end. Otherwise collections take a
    fifth of an import, and tenths of a second during later jobs.
    """
    gc.disable()
    try:
        _import_without_extras()
        yield
    finally:
        gc.freeze()
        gc.enable()


def _import_without_extras() -> None:
    """Import the modules that detect available packages, with some of them hidden.

    transformers uses SciPy for losses of object detectors. diffusers uses PEFT for adapters, which the engines do here.
    A few of diffusers' schedulers need SciPy, and import it on first use.
    """
    if "diffusers" in sys.modules:
        return
    with _hidden("scipy"):
        importlib.import_module("transformers.utils.import_utils").is_scipy_available()  # caches its result
    with _hidden("peft"):
        importlib.import_module("diffusers.utils.import_utils")
    _import_lazily("scipy.stats", "scipy.integrate")


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Suppress warnings, transformers' progress bars, and both libraries' logs below errors, inside the block.

    Both libraries are imported here, since each sets its level at import.
    """
    names = ("diffusers", "transformers")
    for name in names:
        importlib.import_module(name)
    bars = importlib.import_module("transformers.utils.logging")
    had_bars = bars.is_progress_bar_enabled()
    with log_level(logging.ERROR, *names), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bars.disable_progress_bar()
        try:
            yield
        finally:
            if had_bars:
                bars.enable_progress_bar()


@contextmanager
def _hidden(name: str) -> Iterator[None]:
    """Hide a package inside the block (None in ``sys.modules``), unless it is already imported."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]


def _import_lazily(*names: str) -> None:
    """Import the modules, where installed, on first access of an attribute.

    ``importlib.util.LazyLoader`` does not suffice: a second ``import`` of a module loads it.
    """
    stand_ins = {name: ModuleType(name) for name in names if name not in sys.modules and _is_installed(name)}

    def load(name: str, attribute: str) -> Any:
        # ``inspect`` reads ``__file__`` of all modules; imports of submodules read ``__path__``.
        if attribute.startswith("__") and attribute != "__path__":
            raise AttributeError(attribute)
        for each, stand_in in stand_ins.items():  # all: they import each other
            if sys.modules.get(each) is stand_in:
                del sys.modules[each]
        return getattr(importlib.import_module(name), attribute)

    for name, stand_in in stand_ins.items():
        stand_in.__getattr__ = partial(load, name)  # type: ignore[method-assign]  # PEP 562
        sys.modules[name] = stand_in


def _is_installed(name: str) -> bool:
    return find_spec(name.partition(".")[0]) is not None
