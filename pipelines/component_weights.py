"""Load a component's model from its folder by diffusers or transformers, and check its weights.

Every weight must be read, every key of the files used, and every value finite.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights  # type: ignore[import-untyped]
from diffusers import ModelMixin
from safetensors.torch import load_file
from torch import Tensor, nn

from engines.core.torch_private import tree_leaves
from engines.parallel.weight_files import NAME, files_of, first_not_finite, metadata_of, tensor_files, tensor_names
from engines.quantization.scaled_files import dequantised, find_scales
from pipelines.directory import GGUF, SAFETENSORS, lone_file, open_gguf, quantiser_of
from pipelines.gpu_weights import FileTensors

ENCODER_NAME = "model.safetensors"
"""The file's name in transformers."""
VARIANT = re.compile(r"(?:diffusion_pytorch_model|model)\.(\w+?)(?:-\d+-of-\d+)?\.safetensors")
"""Names of files of a variant, one or several, in diffusers and transformers."""
PICKLED = re.compile(r"(?:diffusion_pytorch_model|pytorch_model)(?:-\d+-of-\d+)?\.bin")
"""Names of files without a variant in PyTorch's own format."""
PATH = "pretrained_model_name_or_path"
FAST_DEVICES = ("cuda",)
"""Kinds of devices to which ``gpu_weights`` reads faster than transformers. CPUs use the mapped files themselves."""
ONE_THREAD = "HF_DEACTIVATE_ASYNC_LOAD"
"""Variable with which transformers loads on the calling thread."""
NUM_SHOWN = 5
ENCODERS = {"t5": ("t5", "t5encoder"), "umt5": ("t5", "t5encoder")}
"""Architectures of GGUF files by the type of transformers' configuration, where they differ in more than an ending."""
KEY_VALUE_HEADS = "llama.attention.head_count_kv"
"""Key in a GGUF file's header. Transformers restores the order of rows that llama.cpp has permuted only with it."""
UNUSED_IN_GGUF = re.compile(r"^(rope_freqs|output|dec\..*)\.weight$")
"""Tensors of a GGUF file that an encoder may go without: recomputed values, the head, and the decoder."""
READS = (Tensor.item, Tensor.__float__, Tensor.tolist)
"""Methods with which a translation reads a tensor, such as an alpha, as a number."""


def load_folder(spec: Any, folder: Path, device: torch.device, dtype: torch.dtype, *, dequantise: bool = True) -> Any:
    """Return the model of ``spec``, a component of diffusers' modular pipelines, whose files are in ``folder``.

    Weights of a library's quantiser are dequantised in diffusers' models if requested, in those of transformers never.
    ValueError names tensors if files and model do not match, or a value is not finite.
    """
    kind, quantiser = spec.type_hint, quantiser_of(folder)
    is_own = issubclass(kind, ModelMixin)
    settings: dict[str, Any] = {"dtype": dtype, "output_loading_info": True}
    if not (is_own and quantiser == "torchao"):  # diffusers takes a CPU in a device map for a place to offload to
        settings["device_map"] = {"": str(device)}
    try:
        model, report = _load(spec, folder, device, dtype, settings)
    except Exception as error:
        missing = _missing_weights(kind, folder) if is_own else ""
        raise ValueError(f"the {spec.name} in {folder} cannot be loaded: {missing or error}") from error
    unread = report["unexpected_keys"]
    mismatched = [f"{name} {tuple(own)} for {tuple(written)}" for name, written, own in report["mismatched_keys"]]
    check_complete(
        folder,
        kind.__name__,
        missing=[*report["missing_keys"], *mismatched],
        unread=unread if is_own else _names_of_present_modules(model, unread),
    )
    if quantiser and not (is_own and dequantise):
        return model
    if quantiser:
        model = model.dequantize()
        model = model if "device_map" in settings else model.to(device)
    check_finite(model, lambda name: file_of(folder, name))
    return model


def _load(spec: Any, folder: Path, device: torch.device, dtype: torch.dtype, settings: dict[str, Any]) -> Any:
    """Return the model as its library loads it with ``settings``, and the library's report."""
    kind = spec.type_hint
    place = {name: value for name in spec.loading_fields() if (value := getattr(spec, name)) is not None}
    if (variant := variant_of(folder)) is not None:
        place.setdefault("variant", variant)
    if issubclass(kind, ModelMixin):
        return kind.from_pretrained(place.pop(PATH), **place, **settings)
    if (tensors := _dequantised(folder, dtype)) is not None:
        return _from_tensors(kind, folder, tensors, place[PATH], settings)
    if (file := lone_file(folder)) is not None and file.suffix == GGUF:
        return _from_gguf(kind, file, settings)
    settings |= {"ignore_mismatched_sizes": True}  # they are in the report
    if file is not None or is_read_here(kind, folder, device, place):
        files = FileTensors(_files(folder), device)
        return _from_tensors(kind, folder, files.lazy(), place[PATH], settings)
    return kind.from_pretrained(place.pop(PATH), **place, **settings)


def _from_gguf(kind: Any, file: Path, settings: Mapping[str, Any]) -> Any:
    """Return transformers' model with the tensors of ``file``, and its report.

    ValueError for an architecture that transformers does not read into a ``kind``, and for tensors that it drops.
    """
    from transformers.modeling_gguf_pytorch_utils import (
        GGUF_SUPPORTED_ARCHITECTURES,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    config = kind.config_class.from_pretrained(str(file.parent))
    reader = open_gguf(file)
    architecture = reader.get_field("general.architecture").contents()
    name = config.model_type.removesuffix("_text")
    known = ENCODERS.get(name) or (name,) * (name in GGUF_SUPPORTED_ARCHITECTURES)
    known = known if hasattr(config, "num_hidden_layers") else ()  # not with a tower for pictures
    if architecture not in known:
        readable = f"GGUF files of {' or '.join(known)}" if known else "no GGUF file"
        raise ValueError(
            f"{file} is of {architecture}, and a {kind.__name__} is read from {readable}: take safetensors"
        )
    if architecture == "llama" and KEY_VALUE_HEADS not in reader.fields:
        raise ValueError(f"{file} has no {KEY_VALUE_HEADS}, without which rows stay permuted: convert the model again")
    model, report = kind.from_pretrained(str(file.parent), gguf_file=file.name, config=config, **settings)
    unread = {tensor.name for tensor in reader.tensors} - get_gguf_hf_weights_map(model, TensorProcessor()).keys()
    unread = {name for name in unread if not UNUSED_IN_GGUF.search(name)}
    check_complete(file, kind.__name__, missing=(), unread=unread)
    return model, report


def variant_of(folder: Path) -> str | None:
    """Return the variant ("fp16") of a part's weights if there are no others. ValueError if there are several."""
    if _files(folder) or any(PICKLED.fullmatch(file.name) for file in folder.glob("*.bin")):
        return None
    found = {match[1] for file in folder.glob("*.safetensors") if (match := VARIANT.fullmatch(file.name))}
    if len(found) > 1:
        names = ", ".join(sorted(found))
        raise ValueError(f"{folder} has weights of the variants {names}: keep one of them, or add those without one")
    return next(iter(found), None)


def is_read_here(kind: Any, folder: Path, device: torch.device, place: Collection[str]) -> bool:
    """Return whether weights of transformers are read by ``pipelines.gpu_weights``: on GPUs, from the usual files.

    ``place`` are the settings that say where they are. Other layouts are left to transformers.
    """
    if device.type not in FAST_DEVICES or quantiser_of(folder) or {"variant", "revision"} & set(place):
        return False
    has_more = (folder / "adapter_config.json").is_file() or bool(getattr(kind.config_class, "extra_files", None))
    names_files = "transformers_weights" in json.loads((folder / "config.json").read_text())
    return not (has_more or names_files) and bool(files_of(folder, ENCODER_NAME))


def _from_tensors(kind: Any, folder: Path, tensors: Mapping[str, Any], source: str, settings: Mapping[str, Any]) -> Any:
    """Return transformers' model with ``tensors``, and its report."""
    config = kind.config_class.from_pretrained(str(folder))
    with OnThisThread.loading():
        model, report = kind.from_pretrained(None, config=config, state_dict=tensors, **settings)
    model.name_or_path = model.config.name_or_path = source
    if model.can_generate():
        model.generation_config = _generation_config(folder)
    return model, report


class OnThisThread:
    """Let transformers load on this thread: what others allocate is outside ``WeightMemory.region``.

    Several threads may load at a time. The variable has its old value again when the last of them has loaded.
    """

    _lock = threading.Lock()
    _num_loading = 0
    _previous: str | None = None

    @classmethod
    @contextmanager
    def loading(cls) -> Iterator[None]:
        """Hold the variable set."""
        with cls._lock:
            if not cls._num_loading:
                cls._previous = os.environ.get(ONE_THREAD)
                os.environ[ONE_THREAD] = "1"
            cls._num_loading += 1
        try:
            yield
        finally:
            with cls._lock:
                cls._num_loading -= 1
                if not cls._num_loading:
                    os.environ.pop(ONE_THREAD)
                    os.environ.update({} if cls._previous is None else {ONE_THREAD: cls._previous})


def _generation_config(folder: Path) -> Any:
    """Return the settings of a model's own sampling of text, as transformers reads them beside a folder's weights."""
    from transformers import GenerationConfig

    if (folder / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(str(folder))
    return GenerationConfig.from_pretrained(str(folder), config_file_name="config.json", _from_model_config=True)


def _missing_weights(kind: Any, folder: Path) -> str:
    """Return the missing weights, which diffusers does not name when it cannot place the model on a device."""
    try:
        with init_empty_weights():
            model = kind.from_config(kind.load_config(str(folder)))
        names = names_in(folder)
    except (OSError, ValueError):
        return ""
    missing = [name for name, _ in model.named_parameters() if name not in names] if names else []
    return describe_faults(kind.__name__, missing=missing, unread=())


def _names_of_present_modules(model: Any, names: Iterable[str]) -> list[str]:
    """Return the ``names`` that belong to modules of ``model``.

    A head or tower that its class lacks belongs to the root, or to transformers' base model.
    """
    modules = {name for name, _ in model.named_modules()}
    base = getattr(model, "base_model_prefix", "")
    of_whole = f"{base}." if base and base not in modules else ""  # files of whole models are read into their base
    return [name for name in names if _deepest_module(name.removeprefix(of_whole), modules) not in ("", base)]


def _deepest_module(name: str, modules: Collection[str]) -> str:
    """Return the longest prefix of ``name`` that is a module."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


def check_names(model: Any, folder: Path) -> None:
    """Raise ValueError if files in diffusers' layout have keys that ``model`` has no place for.

    Missing keys are found when tensors are read. Only the heads of files are read here.
    """
    names = names_in(folder)
    unread = names - find_scales(names).beside - set(model.state_dict())
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    check_complete(
        folder,
        type(model).__name__,
        missing=(),
        unread=[name for name in unread if not any(re.search(pattern, name) for pattern in patterns)],
    )


def check_complete(where: Path, kind: str, *, missing: Collection[str], unread: Collection[str]) -> None:
    """Raise ValueError, with the names of tensors, if a ``kind`` lacks some in ``where`` or does not read all."""
    if faults := describe_faults(kind, missing=missing, unread=unread):
        raise ValueError(
            f"{where} is not the {kind} that its configuration describes: {faults}. No model runs with missing or "
            "ignored weights: use files that belong together, in a known layout"
        )


def describe_faults(kind: str, *, missing: Collection[str], unread: Collection[str]) -> str:
    """Return the tensors that a ``kind`` lacks, and those it has no place for; empty if there are none."""
    lacks = f"it lacks {_first_names(missing)}" if missing else ""
    has_more = f"{kind} has no place for {_first_names(unread)}" if unread else ""
    return "; ".join(fault for fault in (lacks, has_more) if fault)


def _first_names(names: Collection[str]) -> str:
    every = sorted(names)
    more = len(every) - NUM_SHOWN
    return ", ".join(every[:NUM_SHOWN]) + (f" and {more} more" if more > 0 else "")


def check_finite(model: nn.Module, file_of: Callable[[str], Path]) -> None:
    """Raise ValueError, with tensor and file, if a weight of ``model`` has values that are NaN or infinite."""
    weights = ((name, weight.detach()) for name, weight in model.named_parameters() if not weight.is_meta)
    if (name := first_not_finite(weights)) is not None:
        raise ValueError(f"{file_of(name)} has values that are not finite in {name}: the file is damaged")


def has_scales(folder: Path) -> bool:
    """Return whether a component's weights have scales beside them, and no library's quantiser is configured."""
    return not quantiser_of(folder) and bool(find_scales(names_in(folder)).beside)


def names_in(folder: Path) -> frozenset[str]:
    """Return the keys of a component's files, without its index. ValueError for a file of another format."""
    return frozenset(name for file in _files(folder) for name in tensor_names(file))


def file_of(folder: Path, name: str) -> Path:
    """Return the file that has a tensor, or the folder if the files use other names."""
    for usual in (NAME, ENCODER_NAME):
        if (file := tensor_files(folder, usual).get(name)) is not None:
            return folder / file
    return folder


def _files(folder: Path) -> tuple[Path, ...]:
    file = lone_file(folder)
    return (
        (file,)
        if file is not None and file.suffix == SAFETENSORS
        else files_of(folder) or files_of(folder, ENCODER_NAME)
    )


def _dequantised(folder: Path, dtype: torch.dtype) -> dict[str, Tensor] | None:
    """Return weights for transformers if the files have scales, else None."""
    if not has_scales(folder):
        return None
    files = _files(folder)
    tensors = {name: x for file in files for name, x in load_file(file).items()}
    return dequantised(tensors, dtype, map(metadata_of, files))


class TrackedTensor(Tensor):
    """A tensor that records its source keys: libraries drop unknown keys without a warning.

    ``numbers`` are the keys whose values were read as numbers.
    """

    sources: frozenset[str]
    numbers: set[str]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        leaves = tree_leaves((args, dict(kwargs or {})))
        given = [x for x in leaves if isinstance(x, TrackedTensor) and hasattr(x, "sources")]
        out = super().__torch_function__(func, tuple(types), args, kwargs or {})  # type: ignore[no-untyped-call]
        if not given:
            return out
        sources = frozenset[str]().union(*(x.sources for x in given))
        if func in READS and given[0].dtype != torch.bool:  # a comparison's result is no use of the value
            given[0].numbers.update(sources)
        results = [args[0]] if out is None and isinstance(args[0], TrackedTensor) else tree_leaves(out)  # x[...] = y
        for x in results:
            if isinstance(x, TrackedTensor):
                x.sources, x.numbers = sources, given[0].numbers
        return out


def track(tensors: Mapping[str, Tensor], numbers: set[str]) -> dict[str, Tensor]:
    """Return ``tensors`` that record their keys. Keys that are read as numbers are added to ``numbers``."""
    tracked: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        one = tensor.as_subclass(TrackedTensor)
        one.sources, one.numbers = frozenset([name]), numbers
        tracked[name] = one
    return tracked


def sources_of(tensor: Any) -> frozenset[str]:
    """Return the source keys of ``tensor``."""
    return tensor.sources if isinstance(tensor, TrackedTensor) and hasattr(tensor, "sources") else frozenset()


def untrack(tensor: Tensor) -> Tensor:
    """Return a tracked tensor as a usual one."""
    return tensor.as_subclass(Tensor)
