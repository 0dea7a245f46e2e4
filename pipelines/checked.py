"""What a part must be before it is used: every weight read, every key of its files used, every value finite."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from torch import nn

from engines.parallel.weight_files import is_finite

NUM_SHOWN = 5


def check_whole(where: Path, kind: str, *, missing: Collection[str], unread: Collection[str]) -> None:
    """Raise ValueError, with the names of tensors, if a ``kind`` lacks some in ``where`` or reads not all of them."""
    if faults := faults_of(kind, missing=missing, unread=unread):
        raise ValueError(
            f"{where} is not the {kind} that its configuration describes: {faults}. Nothing is served with weights "
            "that are made up or left out: take the files that belong together, or a layout that is known"
        )


def faults_of(kind: str, *, missing: Collection[str], unread: Collection[str]) -> str:
    """Return what a ``kind`` lacks, and what it has no place for; empty if there is neither."""
    lacks = f"it lacks {first_of(missing)}" if missing else ""
    has_more = f"{kind} has no place for {first_of(unread)}" if unread else ""
    return "; ".join(fault for fault in (lacks, has_more) if fault)


def check_finite(model: nn.Module, file_of: Callable[[str], Path]) -> None:
    """Raise ValueError, with tensor and file, if a weight of ``model`` has values that are NaN or infinite."""
    for name, weight in model.named_parameters():
        if not weight.is_meta and not is_finite(weight.detach()):
            raise ValueError(f"{file_of(name)} has values that are not finite in {name}: the file is damaged")


def without_other_parts(model: Any, names: Iterable[str]) -> list[str]:
    """Return those of ``names`` that belong to parts that ``model`` has: a head or a tower that its class goes without
    hangs on the root, or on what transformers calls the base model."""
    modules = {name for name, _ in model.named_modules()}
    base = getattr(model, "base_model_prefix", "")
    return [name for name in names if _deepest(name, modules) not in ("", base)]


def _deepest(name: str, modules: Collection[str]) -> str:
    """The longest beginning of ``name`` that is a module."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


def first_of(names: Collection[str]) -> str:
    """Return the first of ``names``, and how many more there are."""
    every = sorted(names)
    more = len(every) - NUM_SHOWN
    return ", ".join(every[:NUM_SHOWN]) + (f" and {more} more" if more > 0 else "")
