"""A transformer built from its configuration alone, to read names and shapes from."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from pipelines.models.spec import Config

if TYPE_CHECKING:
    from torch import nn


def empty(module_class: Any, config: Config) -> nn.Module:
    """Return the module on "meta", where it takes no memory."""
    import torch

    accepted = inspect.signature(module_class.__init__).parameters
    with torch.device("meta"):
        module: nn.Module = module_class(**{name: value for name, value in config.items() if name in accepted})
    return module.eval()


def repeated_blocks(module: Any) -> tuple[str, ...]:
    """Return the names of the lists of blocks that the class declares as repeated."""
    from torch import nn

    repeated = set(getattr(module, "_repeated_blocks", None) or ())
    lists = ((name, inner) for name, inner in module.named_modules() if isinstance(inner, nn.ModuleList))
    return tuple(name for name, inner in lists if {type(block).__name__ for block in inner} & repeated)
