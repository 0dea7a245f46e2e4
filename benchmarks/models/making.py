"""What making a model takes, be it another project's."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from torch import nn


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """What modules are made in, and some choose their kernels by."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def draw_vectors(module: nn.Module) -> None:
    """Puts norms, biases and the like away from 1 and 0, which hide faults."""
    for name, parameter in module.named_parameters():
        if parameter.ndim == 1:
            noise = torch.randn_like(parameter)
            parameter.data.copy_(1 + 0.2 * noise if "norm" in name and "weight" in name else 0.05 * noise)


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
