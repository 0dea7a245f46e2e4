"""Whole differences of parameters in files of adapters: ``.diff`` of a weight, ``.diff_b`` of a bias, ``.diff_m`` of a
modulation (LightX2V's documents on adapters; ComfyUI reads the first two).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from pipelines.lora.spelling import shown
from pipelines.lora.translation import MAKERS_PREFIXES, translate_weights

ENDS = {".diff": ".weight", ".diff_b": ".bias", ".diff_m": ".modulation"}
FLAT_NAMES = "lora_"
"""Keys whose layers are written with underscores are left to diffusers' loaders."""


def split_differences(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return whole differences, and all else."""
    whole = {
        key: tensor for key, tensor in tensors.items() if key.endswith(tuple(ENDS)) and not key.startswith(FLAT_NAMES)
    }
    return whole, {key: tensor for key, tensor in tensors.items() if key not in whole}


def by_parameter(differences: Mapping[str, Tensor], module: nn.Module, path: Path) -> dict[str, Tensor]:
    """Return ``differences``, which were read from ``path``, by the parameters of ``module``.

    Names are those of the model's makers, as diffusers translates them, or else diffusers' own. ValueError, with keys,
    for others, unless they are zero.
    """
    parameters = {name for name, _ in module.named_parameters()}
    origin = {_parameter(key): key for key in differences}
    makers = {name: differences[key] for name, key in origin.items()}
    found: dict[str, Tensor] = {}
    for name, value, source in translate_weights(makers, module):
        if name in parameters:
            found[name] = value
            origin.pop(source, None)
    for name, key in list(origin.items()):
        bare = name.rpartition(".")[0]
        if own := next((one for one in (name, bare) if one in parameters and one not in found), None):
            found[own] = differences[key]
            del origin[name]
    if lost := [key for key in origin.values() if differences[key].count_nonzero()]:
        raise ValueError(
            f"{path} has differences of parameters that {type(module).__name__} has not: {shown(lost)}. It is for "
            "another model, or in a layout that is not known"
        )
    return found


def _parameter(key: str) -> str:
    """The parameter's name, as the model's makers or diffusers have it."""
    prefix = next(prefix for prefix in MAKERS_PREFIXES if key.startswith(prefix))
    name = key.removeprefix(prefix)
    end = next(end for end in sorted(ENDS, key=len, reverse=True) if name.endswith(end))
    return name.removesuffix(end) + ENDS[end]
