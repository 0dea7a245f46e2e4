"""The spellings in which trainers write the keys of adapters, brought to one: pairs as PEFT names them, by layers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from engines.parallel.weight_files import is_finite

UP, DOWN, UP_BIAS, ALPHA = ".lora_B.weight", ".lora_A.weight", ".lora_B.bias", ".alpha"
OTHER_SPELLINGS = {".lora_down.weight": DOWN, ".lora_up.weight": UP, ".lora.down.weight": DOWN, ".lora.up.weight": UP}
ADAPTER_NAME = re.compile(r"(\.lora_(?:A|B|down|up))\.default\.")
"""PEFT's name of the adapter inside a key, where a trainer saved the module and not its adapter."""
NUM_SHOWN = 3


def read_adapter(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file, without PEFT's name of the adapter in keys.

    ValueError, which names the file, for what is no safetensors file, or has values that are not finite.
    """
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is no safetensors file, or not the whole of one ({error})") from error
    for key, tensor in tensors.items():
        if not is_finite(tensor):
            raise ValueError(f"{path} has values that are not finite in {key}: the adapter is damaged")
    return {ADAPTER_NAME.sub(r"\1.", key): tensor for key, tensor in tensors.items()}


def as_pairs(tensors: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """Return ``tensors`` by keys without ``prefix``, each half of a pair as PEFT names it."""
    spelled: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        name = key.removeprefix(prefix)
        for end, own in OTHER_SPELLINGS.items():
            name = name.removesuffix(end) + own if name.endswith(end) else name
        spelled[name] = tensor
    return spelled


def layer_of(key: str) -> str:
    return re.split(r"\.(?:lora|lokr)_", key)[0].removesuffix(ALPHA)


def are_layers_of(module: nn.Module, keys: Iterable[str]) -> bool:
    """Return whether each of ``keys``, in PEFT's spelling, is of a layer that ``module`` has."""
    parameters = {name for name, _ in module.named_parameters()}
    return all(f"{layer_of(key)}.weight" in parameters for key in keys)


def shown(keys: Iterable[str]) -> str:
    """Return the first of ``keys``, and how many more there are."""
    every = sorted(keys)
    more = len(every) - NUM_SHOWN
    return ", ".join(every[:NUM_SHOWN]) + (f" and {more} more" if more > 0 else "")
