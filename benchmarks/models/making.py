"""What making a model takes, be it another project's."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """What modules are made in, and some choose their kernels by."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def without_init(package: str, *subpackages: str) -> None:
    """From here on modules of ``package`` and those below it are imported without running these packages' ``__init__``.

    For projects that import all that they have, with its optional needs, or change others' code as they are imported.
    Raises ValueError if the package is not installed.
    """
    found = importlib.util.find_spec(package)
    if found is None or found.submodule_search_locations is None:
        raise ValueError(f"{package} is not installed")
    root = found.submodule_search_locations[0]
    for name in (package, *subpackages):
        bare = ModuleType(name)
        bare.__path__ = ["/".join((root, *name.split(".")[1:]))]
        sys.modules[name] = bare
