"""What diffusers and transformers import when they are imported, without what nobody here asks them for.

Imports are most of the start of a process of a small model, and there are many such processes.
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

from engines.core.log_level import log_level


@contextmanager
def quick_imports() -> Iterator[None]:
    """Inside the block the libraries are imported in two thirds of the time. To be used where a process starts.

    Nothing is collected meanwhile, and what is there at the end is never looked at again: collections that go through
    all that libraries have made take a fifth of an import, and tenths of a second in the midst of a job later.
    """
    gc.disable()
    try:
        _import_without_extras()
        yield
    finally:
        gc.freeze()
        gc.enable()


def _import_without_extras() -> None:
    """Imports what decides for the rest which packages there are.

    transformers wants SciPy for losses of object detectors, and diffusers PEFT for adapters (here they are the
    engines' own): neither is there for them, as in an environment of the project's own requirements alone. diffusers'
    schedulers, a few of which compute with SciPy, get it when they do.
    """
    if "diffusers" in sys.modules:
        return
    with _hidden("scipy"):
        importlib.import_module("transformers.utils.import_utils").is_scipy_available()  # it remembers the answer
    with _hidden("peft"):
        importlib.import_module("diffusers.utils.import_utils")
    _put_off("scipy.stats", "scipy.integrate")


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Inside the block diffusers and transformers log errors alone, and Python's warnings are not shown.

    Both are imported here: each sets its own level as it is imported.
    """
    names = ("diffusers", "transformers")
    for name in names:
        importlib.import_module(name)
    with log_level(logging.ERROR, *names), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _hidden(name: str) -> Iterator[None]:
    """Inside the block the package is not there (None in ``sys.modules`` means that), unless it is imported already."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]


def _put_off(*names: str) -> None:
    """Has modules, where their packages are installed, imported when an attribute of one is asked for first.

    ``importlib.util.LazyLoader`` would not do: a second ``import`` of a module, as libraries have it, loads it.
    """
    stand_ins = {name: ModuleType(name) for name in names if name not in sys.modules and _is_installed(name)}

    def load(name: str, attribute: str) -> Any:
        # Who goes through all modules, as ``inspect`` does, asks for their files. Imports of what is inside ask for
        # the path.
        if attribute.startswith("__") and attribute != "__path__":
            raise AttributeError(attribute)
        for each, stand_in in stand_ins.items():  # all of them: they import parts of each other
            if sys.modules.get(each) is stand_in:
                del sys.modules[each]
        return getattr(importlib.import_module(name), attribute)

    for name, stand_in in stand_ins.items():
        stand_in.__getattr__ = partial(load, name)  # type: ignore[method-assign]  # PEP 562
        sys.modules[name] = stand_in


def _is_installed(name: str) -> bool:
    return find_spec(name.partition(".")[0]) is not None
