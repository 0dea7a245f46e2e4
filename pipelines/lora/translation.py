"""Translates adapters in a makers' names, through diffusers' translations of adapters or of weights.

A translation may drop keys silently, so the keys that each one uses are tracked here.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from diffusers.utils import convert_unet_state_dict_to_peft
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from engines.parallel.weight_files import is_finite, metadata_of, tensor_names
from pipelines.component_weights import sources_of, track, untrack
from pipelines.models.makers_layers import known_name, translate_layers
from pipelines.models.registry import load_spec

UP, DOWN, UP_BIAS, ALPHA = ".lora_B.weight", ".lora_A.weight", ".lora_B.bias", ".alpha"
OTHER_SPELLINGS = {".lora_down.weight": DOWN, ".lora_up.weight": UP, ".lora.down.weight": DOWN, ".lora.up.weight": UP}
ADAPTER_NAME = re.compile(r"(\.lora_(?:A|B|down|up))\.default\.")
"""PEFT's name of the adapter inside a key, if a trainer saved the whole module."""
EIGHT_BITS = {torch.float8_e4m3fn: torch.bfloat16, torch.float8_e5m2: torch.bfloat16}
"""Dtypes that have all values of these."""
NUM_SHOWN = 3


def read_adapter(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file, in bfloat16 if they are in eight bits.

    ValueError, which names the file, if it is no safetensors file or has values that are not finite.
    """
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is no safetensors file, or not the whole of one ({error})") from error
    for key, tensor in tensors.items():
        if tensor.dtype in EIGHT_BITS:  # torch compares and adds none of these
            tensors[key] = tensor = tensor.to(EIGHT_BITS[tensor.dtype])
        if not is_finite(tensor):
            raise ValueError(f"{path} has values that are not finite in {key}: the adapter is damaged")
        if not (tensor.is_floating_point() or key.endswith(ALPHA)):
            raise ValueError(f"{path} has {key} in {str(tensor.dtype).removeprefix('torch.')}: save it in float")
    return tensors


def keys_by_name(keys: Iterable[str], name_of: Callable[[str], str]) -> dict[str, str]:
    """Return ``keys`` by their other names. ValueError if two have one name: all but the last would be lost."""
    found: dict[str, str] = {}
    for key in keys:
        if (other := found.setdefault(name_of(key), key)) != key:
            raise ValueError(f"an adapter's keys {other} and {key} stand for one tensor: keep one of them")
    return found


def without_adapter_name(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``tensors`` without PEFT's name of the adapter in keys."""
    names = keys_by_name(tensors, lambda key: ADAPTER_NAME.sub(r"\1.", key))
    return {name: tensors[key] for name, key in names.items()}


def as_pairs(tensors: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """Return ``tensors`` by keys without ``prefix``, each half of a pair as PEFT names it."""

    def spelled(key: str) -> str:
        name = key.removeprefix(prefix)
        for end, own in OTHER_SPELLINGS.items():
            name = name.removesuffix(end) + own if name.endswith(end) else name
        return name

    return {name: tensors[key] for name, key in keys_by_name(tensors, spelled).items()}


def layer_of(key: str) -> str:
    return re.split(r"\.(?:lora|lokr|hada)_", key)[0].removesuffix(ALPHA)


def are_layers_of(module: nn.Module, keys: Iterable[str]) -> bool:
    """Return whether ``module`` has the layers of all ``keys``, in PEFT's spelling."""
    parameters = {name for name, _ in module.named_parameters()}
    return all(f"{layer_of(key)}.weight" in parameters for key in keys)


def shown(keys: Iterable[str]) -> str:
    """Return the first of ``keys`` and the number of others, as text."""
    every = sorted(keys)
    more = len(every) - NUM_SHOWN
    return ", ".join(every[:NUM_SHOWN]) + (f" and {more} more" if more > 0 else "")


ERRORS = (AssertionError, AttributeError, IndexError, KeyError, NameError, RuntimeError, TypeError, ValueError)
"""Errors of diffusers' translations for files of other models."""
PEFT_PREFIX = "base_model.model."
MAKERS_PREFIXES = ("model.diffusion_model.", "diffusion_model.", "transformer.", "unet.", PEFT_PREFIX, "")
FLAT_PREFIXES = ("lora_unet__", "lora_unet_", "lora_transformer_", "lycoris_")
"""Prefixes of keys that write layers with underscores: of VideoX-Fun, kohya's scripts, OneTrainer and LyCORIS."""
MAX_UNDERSCORES = 11
"""In a layer's name: each may be a point."""
REPEATED = {"qkv": "to_q", "out": "to_out_0"}
"""Layers that some trainers write twice, by ends of names: fused, and as in the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Translated:
    """An adapter's file in diffusers' keys."""

    tensors: Mapping[str, Tensor]
    """Low-rank factors and differences by diffusers' key."""
    alphas: Mapping[str, float]
    """Numerator of each layer's scale (alpha / rank) where the file has one."""
    config: Mapping[str, Any] | None = None
    """PEFT's configuration in the file's metadata; None without one."""


def by_loader(
    path: Path, tensors: Mapping[str, Tensor], pipeline_class: Any, module: nn.Module, *, is_scaled: bool = False
) -> Translated:
    """Return a file as translated by the loader of ``pipeline_class``; keys begin with the names of parts.

    ``tensors`` are those of the file at ``path`` that are used; if they are scaled, its header does not count.
    ValueError for a file that the loader cannot read, or of which it drops something.
    """
    numbers: set[str] = set()
    try:
        with nullcontext(dict(tensors)) if is_scaled else _source(path, tensors) as source:
            values = _load(pipeline_class, module, source)
        tracked = _load(pipeline_class, module, track(tensors, numbers))
    except ERRORS as error:
        raise ValueError(
            f"{path} is for another model, or in a layout that is not known: diffusers cannot read it as an adapter "
            f"for {pipeline_class.__name__} ({type(error).__name__}: {error})"
        ) from error
    used = numbers.union(*(sources_of(x) for part in tracked for x in part.values()))
    ignored = _ignored_alphas(tensors, used, tracked[0])
    used |= {key for key, _ in ignored}
    if lost := [key for key in tensors if key not in used and not _may_be_dropped(key, tensors)]:
        raise ValueError(f"{path} has parts that nothing here reads: {shown(lost)}. Without them it is another adapter")
    found, alphas, config = values
    all_alphas = {**{key: found[key] for key in found if key.endswith(ALPHA)}, **alphas}
    found = {key: tensor for key, tensor in found.items() if key not in all_alphas}
    alphas_of = {key.removesuffix(ALPHA): float(alpha) for key, alpha in all_alphas.items()}
    if found and not any(".lora_A" in key for key in found):
        found, alphas_of = map(convert_unet_state_dict_to_peft, (found, alphas_of))
    by_layer = {layer_of(key): alpha for key, alpha in alphas_of.items()}
    by_layer |= {layer: float(tensors[key]) for key, layer in ignored}
    return Translated(tensors=found, alphas=by_layer, config=config or None)


def by_own_names(tensors: Mapping[str, Tensor], module: nn.Module) -> dict[str, Tensor] | None:
    """Return pairs and alphas of layers in the names of ``module``, with points or underscores; None for others."""
    layers = {name.removesuffix(".weight") for name, _ in module.named_parameters() if name.endswith(".weight")}
    for prefix in MAKERS_PREFIXES:
        if all(key.startswith(prefix) for key in tensors):
            pairs = as_pairs(tensors, prefix)
            if all(layer_of(key) in layers for key in pairs):
                return pairs
    flat: dict[str, list[str]] = {}
    for layer in layers:
        flat.setdefault(layer.replace(".", "_"), []).append(layer)
    for prefix in FLAT_PREFIXES:
        named = {key: key.removeprefix(prefix).partition(".") for key in tensors if key.startswith(prefix)}
        if len(named) == len(tensors) and all(len(flat.get(one, ())) == 1 for one, *_ in named.values()):
            return as_pairs({f"{flat[one][0]}.{end}": tensors[key] for key, (one, _, end) in named.items()})
    return None


def by_weights(
    tensors: Mapping[str, Tensor], module: nn.Module, alpha_of: Callable[[str, int], float] | None = None
) -> Translated | None:
    """Return pairs in the makers' names under those of ``module``, through diffusers' translation of weights.

    Layers that diffusers splits share their first half. ``alpha_of`` returns the alpha of a layer by its name and rank,
    if a configuration has them. None if not all become layers of ``module``.
    """
    prefix = next(prefix for prefix in MAKERS_PREFIXES if all(key.startswith(prefix) for key in tensors))
    pairs = as_pairs(tensors, prefix)
    layers = dict.fromkeys(layer_of(key) for key in pairs)
    expected = {layer + end for layer in layers for end in (UP, DOWN, ALPHA)}
    if not set(pairs) <= expected or not all({layer + UP, layer + DOWN} <= set(pairs) for layer in layers):
        return None
    found: dict[str, Tensor] = {}
    alphas: dict[str, float] = {}
    for name, up_NR, source in translate_weights({f"{layer}.weight": pairs[layer + UP] for layer in layers}, module):
        layer, origin = name.removesuffix(".weight"), source.removesuffix(".weight")
        found |= {layer + UP: up_NR, layer + DOWN: pairs[origin + DOWN]}
        if alpha_of is not None:
            alphas[layer] = alpha_of(origin, len(pairs[origin + DOWN]))
        elif origin + ALPHA in pairs:
            alphas[layer] = float(pairs[origin + ALPHA])
        layers.pop(origin, None)
    is_all = bool(found) and not layers and are_layers_of(module, found)
    return Translated(tensors=found, alphas=alphas) if is_all else None


def as_flat_pairs(tensors: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Return pairs of layers with points in their names in kohya's spelling; None for other tensors."""
    prefix = next(prefix for prefix in MAKERS_PREFIXES if all(key.startswith(prefix) for key in tensors))
    ends = {DOWN: ".lora_down.weight", UP: ".lora_up.weight", ALPHA: ALPHA}
    flat: dict[str, Tensor] = {}
    for key, tensor in as_pairs(tensors, prefix).items():
        if (end := next((end for end in ends if key.endswith(end)), None)) is None or not prefix:
            return None
        flat[f"lora_unet_{key.removesuffix(end).replace('.', '_')}{ends[end]}"] = tensor
    return flat if len(flat) == len(tensors) else None


def with_points(tensors: Mapping[str, Tensor], module: nn.Module) -> dict[str, Tensor] | None:
    """Return pairs with underscores for points under the makers' names of layers; None if one of them is not known.

    A name is known if diffusers' translation of weights makes one of ``module`` from it.
    """
    prefix = next((prefix for prefix in FLAT_PREFIXES if all(key.startswith(prefix) for key in tensors)), None)
    if prefix is None:
        return None
    pairs = as_pairs(tensors, prefix)
    shapes = {re.sub(r"\d+", "0", key.removesuffix(UP)): key.removesuffix(UP) for key in pairs if key.endswith(UP)}
    pointed: dict[str, str] = {}
    for shape, layer in shapes.items():
        if (name := _pointed(layer, pairs[layer + UP], module)) is None:
            return None  # at once: a file of a client may have any number of names
        pointed[shape] = name
    named: dict[str, Tensor] = {}
    for key, x in pairs.items():
        layer, _, end = key.partition(".")
        if (name := pointed.get(re.sub(r"\d+", "0", layer))) is None:
            return None
        marks = re.sub(r"[^._]", "", name)
        named[f"{_joined(layer.split('_'), marks)}.{end}"] = x
    return named


def _pointed(layer: str, up_NR: Tensor, module: nn.Module) -> str | None:
    """Return a name with points for underscores of ``layer`` that becomes one of ``module``.

    None without one, or if names become different ones.
    """
    parts = layer.split("_")
    if len(parts) > MAX_UNDERSCORES + 1:
        return None
    gaps = product("._", repeat=len(parts) - 1)
    candidates = {f"{_joined(parts, marks)}.weight": up_NR for marks in gaps}
    own = {name for name, _ in module.named_parameters()}
    found: dict[str, set[str]] = {}
    translated = list(translate_weights(candidates, module))
    if not translated and not load_spec(type(module).__name__).makers_layers:
        for one in candidates:  # FLUX.2's translation stops at the first name that is none
            translated += translate_weights({one: up_NR}, module)
    for name, _, source in translated:
        if name in own:
            found.setdefault(source, set()).add(name)
    return min(found).removesuffix(".weight") if len(set(map(frozenset, found.values()))) == 1 else None


def _joined(parts: Iterable[str], marks: Iterable[str]) -> str:
    return "".join(part + mark for part, mark in zip(parts, (*marks, ""), strict=True))


def translate_weights(weights: Mapping[str, Tensor], module: Any) -> Iterator[tuple[str, Tensor, str]]:
    """Yield weights in the makers' names as (diffusers' name, value, makers' name), if translated one to one."""
    loader = SINGLE_FILE_LOADABLE_CLASSES.get(type(module).__name__)
    layers = load_spec(type(module).__name__).makers_layers
    if layers or loader is None or not weights:
        yield from translate_layers(weights, layers, module)
        return
    known = {known_name(name): x for name, x in track(weights, set()).items()}
    try:
        translated = loader["checkpoint_mapping_fn"](config=dict(module.config), checkpoint=known)
    except ERRORS:
        return
    for name, value in translated.items():
        if len(sources_of(value)) == 1:
            (source,) = sources_of(value)
            yield name, untrack(value), source


def _load(pipeline_class: Any, module: Any, source: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return tensors, alphas and config from diffusers' loader."""
    read = pipeline_class.lora_state_dict
    options: dict[str, Any] = {"return_alphas": True} if "return_alphas" in inspect.signature(read).parameters else {}
    options |= {"unet_config": getattr(module, "config", None)} if hasattr(pipeline_class, "unet_name") else {}
    tensors, *alphas, config = read(source, use_safetensors=True, return_lora_metadata=True, **options)
    return tensors, (alphas and alphas[0]) or {}, config or {}


def _ignored_alphas(
    tensors: Mapping[str, Tensor], used: Collection[str], tracked: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """Return alphas that a loader drops although it uses their layers (FLUX.1's last), each with its layer."""
    origins = {key: layer_of(next(iter(as_pairs({key: x})))) for key, x in tensors.items()}
    scaled = {
        (origins[source] + ALPHA, layer_of(key))
        for key, x in tracked.items()
        if key.endswith((DOWN, UP))
        for source in sources_of(x)
    }
    return [(key, layer) for key, layer in sorted(scaled) if key in tensors and key not in used]


@contextmanager
def _source(path: Path, tensors: Mapping[str, Tensor]) -> Iterator[Any]:
    """Hold what diffusers reads ``tensors`` of the file at ``path`` from: a file if its header says more than a format.

    The header may have the scale of all layers.
    """
    header = metadata_of(path)
    if set(tensor_names(path)) == set(tensors):
        yield str(path)
    elif set(header) <= {"format"}:
        yield dict(tensors)
    else:
        with TemporaryDirectory() as folder:
            file = Path(folder) / path.name
            save_file({key: x.contiguous() for key, x in tensors.items()}, file, metadata=header)
            yield str(file)


def _may_be_dropped(key: str, tensors: Mapping[str, Tensor]) -> bool:
    """Return whether a key may be dropped: zeros and duplicates."""
    if not torch.count_nonzero(tensors[key]):
        return True
    layers = {layer_of(other) for other in as_pairs(tensors)}
    layer = layer_of(next(iter(as_pairs({key: tensors[key]}))))
    return any(layer.endswith(end) and layer.removesuffix(end) + same in layers for end, same in REPEATED.items())
