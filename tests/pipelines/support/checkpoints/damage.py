"""Change files of a part into published forms and damaged ones."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
FP8_LIMIT = 448


def changed(base: Path, part: str, target: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """Copy the folder ``base``, with ``part``'s tensors replaced by ``change`` of them. Return the copy."""
    shutil.copytree(base, target)
    (file,) = (target / part).glob("*.safetensors")
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    return target


def scaled(tensors: Tensors, ending: str, *, by_row: bool = False, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensors:
    """Return square weights in eight bits, each with its scale under the key that ends in ``ending``."""
    written: Tensors = {}
    for name, x in tensors.items():
        if name.endswith(".weight") and x.ndim == 2 and ("attention" in name or "attn" in name):
            largest = x.abs().amax(1, keepdim=True) if by_row else x.abs().max()
            scale = largest.float() / (FP8_LIMIT if dtype.is_floating_point else 127)
            stored = x.float() / scale
            written[name] = (stored if dtype.is_floating_point else stored.round()).to(dtype)
            written[name.removesuffix(".weight") + ending] = scale
        else:
            written[name] = x
    return written


def by_hand(tensors: Tensors, ending: str) -> Tensors:
    """Return the tensors that ``scaled`` stands for: each weight times its scale."""
    plain = {name: x.float() for name, x in tensors.items() if not name.endswith(ending)}
    for name in tensors:
        if name.endswith(ending):
            plain[name.removesuffix(ending) + ".weight"] *= tensors[name]
    return plain
