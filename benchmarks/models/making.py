"""Helpers for making models, also those of other projects."""

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
    """Set the dtype that modules are made in, and by which some choose their kernels."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def draw_vectors(module: nn.Module) -> None:
    """Draw norms, biases, other vectors, and matrices of zeros away from 1 and 0, which hide faults."""
    for name, parameter in module.named_parameters():
        if parameter.ndim == 1:
            noise = torch.randn_like(parameter)
            parameter.data.copy_(1 + 0.2 * noise if "norm" in name and "weight" in name else 0.05 * noise)
        elif not parameter.any():  # a block whose gate is zero computes nothing that is seen
            parameter.data.normal_(std=0.02)


def without_init(package: str, *subpackages: str) -> None:
    """Import modules of these packages from here on without running the packages' ``__init__``.

    Some projects import all that they have, with its optional needs, or change other projects' code on import. A
    package that is imported already stays as it is. ValueError if the package is not installed.
    """
    found = importlib.util.find_spec(package)
    if found is None or found.submodule_search_locations is None:
        raise ValueError(f"{package} is not installed")
    root = found.submodule_search_locations[0]
    for name in (package, *subpackages):
        bare = ModuleType(name)
        bare.__path__ = ["/".join((root, *name.split(".")[1:]))]
        sys.modules.setdefault(name, bare)
