"""A transformer class by its configuration alone, to read names and shapes from."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from pipelines.models.spec import Config

if TYPE_CHECKING:
    from torch import nn


def empty(module_class: Any, config: Config) -> nn.Module:
    """All of it on "meta", where it takes no memory."""
    import torch

    known = inspect.signature(module_class.__init__).parameters
    with torch.device("meta"):
        module: nn.Module = module_class(**{name: value for name, value in config.items() if name in known})
    return module.eval()


def repeated_blocks(module: Any) -> tuple[str, ...]:
    """Names of the lists of those blocks that the class says are repeated."""
    from torch import nn

    repeated = set(getattr(module, "_repeated_blocks", None) or ())
    lists = ((name, inner) for name, inner in module.named_modules() if isinstance(inner, nn.ModuleList))
    return tuple(name for name, inner in lists if {type(block).__name__ for block in inner} & repeated)
