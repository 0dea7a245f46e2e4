"""A model whose ranks each read their own share of its weights from the files, for what fits no single device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.family import Family

if TYPE_CHECKING:
    import torch

    from engines.core.model import DenoiserModel


def load_sliced(family: Family, path: Path, device: torch.device, dtype: torch.dtype) -> DenoiserModel:
    """``family.load_denoiser`` without reading a weight: an engine reads what its rank needs, onto ``device``."""
    from engines.parallel.weight_files import WeightFiles

    outline = _without_weights(family, path, dtype)
    weights = WeightFiles(folders={part: path / part for part in outline.modules}, device=device)
    probe: Any = outline.probe  # a record with the device of its inputs, which was the outline's
    return replace(outline, weights=weights, probe=replace(probe, device=device))


def weights_bytes(family: Family, path: Path, dtype: torch.dtype) -> int:
    """What the denoiser's weights take in memory, whole; from the configuration alone."""
    modules = _without_weights(family, path, dtype).modules.values()
    return sum(weight.nbytes for module in modules for weight in module.parameters())


def _without_weights(family: Family, path: Path, dtype: torch.dtype) -> DenoiserModel:
    """Parameters on "meta". Buffers are there: they are computed, and in no file."""
    from accelerate import init_empty_weights  # type: ignore[import-untyped]

    with init_empty_weights():
        return family.outline_denoiser(path, dtype)
