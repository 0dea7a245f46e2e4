"""Weights that are read slice by slice: a rank loads its share of a model that fits no single device."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from engines.core.shard_plan import ColumnLinear, RowLinear, ShardPlan
from engines.core.torch_private import has_persistent_buffer
from engines.parallel.collectives import Axis
from engines.parallel.tensor import matching, share, shares
from engines.quantization.scaled_files import PLAIN, find_formats, find_scales, multiplied, scaled_weight

NAME = "diffusion_pytorch_model.safetensors"
INDEX = f"{NAME}.index.json"
HOST = torch.device("cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """The part of a tensor in a file that fills a parameter."""

    name: str
    """Key in the file."""
    dim: int = 0
    """Dim of ``ranges``, 0 or 1."""
    ranges: tuple[tuple[int, int], ...] = ()
    """Half-open ranges of entries; empty: all of the tensor."""

    def read(self, file: Any) -> Tensor:
        """Read only the slice from disk. Copy it, because the file returns views of a mapping of the whole file."""
        if not self.ranges:
            whole: Tensor = file.get_tensor(self.name)
            return whole
        source = file.get_slice(self.name)
        pieces = [source[start:stop] if self.dim == 0 else source[:, start:stop] for start, stop in self.ranges]
        return (
            pieces[0].clone(memory_format=torch.contiguous_format) if len(pieces) == 1 else torch.cat(pieces, self.dim)
        )

    def of_columns(self, weight: Tensor) -> Tensor:
        """Return the part of a whole ``weight`` that is read, if only some of its columns are."""
        if not self.ranges or self.dim != 1:
            return weight
        return torch.cat([weight[:, start:stop] for start, stop in self.ranges], dim=1)

    def of_rows(self, scale: Tensor) -> Tensor:
        """Return the part of ``scale`` for the rows that are read."""
        if scale.numel() == 1 or not self.ranges or self.dim != 0:
            return scale
        return torch.cat([scale[start:stop] for start, stop in self.ranges])


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFiles:
    """Safetensors in folders, whole or sharded with an index."""

    folders: Mapping[str, Path]
    """Folder by module; a submodule may have one of its own, as ``module.submodule``."""
    device: torch.device
    """Device of the loaded weights."""

    def fill(
        self,
        name: str,
        module: nn.Module,
        slices: Mapping[str, Slice],
        leave_out: Collection[nn.Module] = (),
        on_host: Collection[str] = (),
    ) -> None:
        """Load weights into ``module`` (its parameters on "meta"), except into the modules in ``leave_out``.

        ``slices`` are for parameters that are not a whole tensor of the same name. The parameters ``on_host`` are not
        moved to the device. ValueError if a tensor is missing from the files or has another shape.
        """
        excluded = {id(each) for unused in leave_out for each in unused.modules()}
        with ExitStack() as stack:
            inner = [own.removeprefix(f"{name}.") for own in self.folders if own.startswith(f"{name}.")]
            files = {own: _OpenFiles(self.folders[f"{name}.{own}"], stack, own) for own in inner}
            files[""] = _OpenFiles(self.folders[name], stack)
            for prefix, owner in module.named_modules():
                if id(owner) not in excluded:
                    self._fill_one(owner, prefix, slices, files.get(prefix.split(".")[0], files[""]), on_host)

    def _fill_one(
        self, owner: nn.Module, prefix: str, slices: Mapping[str, Slice], files: _OpenFiles, on_host: Collection[str]
    ) -> None:
        for leaf, parameter in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            name = f"{prefix}.{leaf}" if prefix else leaf
            device = HOST if name in on_host else self.device
            value = self._read(files, slices.get(name, Slice(name=name)), parameter, device)
            owner.register_parameter(leaf, nn.Parameter(value, requires_grad=False))
        for leaf, buffer in list(owner.named_buffers(recurse=False, remove_duplicate=False)):
            name = f"{prefix}.{leaf}" if prefix else leaf
            if has_persistent_buffer(owner, leaf) and name in files.names:
                setattr(owner, leaf, self._read(files, slices.get(name, Slice(name=name)), buffer, self.device))
            else:
                setattr(owner, leaf, buffer.to(self.device))

    def _read(self, files: _OpenFiles, part: Slice, target: Tensor, device: torch.device) -> Tensor:
        """Return the tensor in the dtype of ``target``, on ``device``."""
        value = files.read(part)
        if value.shape != target.shape:
            raise ValueError(
                f"{files.file_of(part.name)} has {part.name} as {tuple(value.shape)}, which is "
                f"{tuple(target.shape)} here"
            )
        value = value.to(device, target.dtype)
        if not is_finite(value):
            raise ValueError(f"{files.file_of(part.name)} has values that are not finite in {part.name}")
        return value


class _OpenFiles:
    """The files of one folder, each opened at first use. ``prefix`` is the name of its submodule."""

    def __init__(self, folder: Path, stack: ExitStack, prefix: str = "") -> None:
        self.folder, self._stack, self._prefix = folder, stack, prefix and f"{prefix}."
        self._open: dict[str, Any] = {}
        self._file_of = {f"{self._prefix}{name}": file for name, file in tensor_files(folder).items()}
        if not self._file_of:
            raise ValueError(
                f"{folder} has neither {NAME} nor {INDEX}: weights can only be read slice by slice from those"
            )
        self._scales = find_scales(self.names)
        headers = (metadata_of(folder / file) for file in sorted(set(self._file_of.values())))
        self._formats = find_formats(self._scales, self._whole, headers)

    @property
    def names(self) -> Collection[str]:
        return self._file_of.keys()

    def file_of(self, name: str) -> Path:
        return self.folder / self._file_of[name]

    def read(self, part: Slice) -> Tensor:
        """Return the tensor; in float32 if the files have a scale beside the weight."""
        if (scale := self._scales.of_weight.get(part.name)) is None:
            return self._read(part)
        written = self._formats.get(part.name, PLAIN)
        if written.blocks or (written.group > 1 and part.dim == 1):  # a rotation needs all columns of its groups
            whole = scaled_weight(part.name, self._scales, self._formats, self._whole)
            return part.of_columns(part.of_rows(whole))
        return multiplied(self._read(part), part.of_rows(self._whole(scale)), part.name, written.group)

    def _whole(self, name: str) -> Tensor:
        return self._read(Slice(name=name))

    def _read(self, part: Slice) -> Tensor:
        if part.name not in self._file_of:
            file = INDEX if (self.folder / INDEX).is_file() else NAME
            raise ValueError(f"{self.folder / file} lists no tensor {part.name}")
        file = self._file_of[part.name]
        try:
            if file not in self._open:
                self._open[file] = self._stack.enter_context(safe_open(self.folder / file, framework="pt"))
            return replace(part, name=part.name.removeprefix(self._prefix)).read(self._open[file])
        except Exception as error:
            raise ValueError(f"{self.folder / file}: {part.name} cannot be read ({error})") from error


def is_finite(value: Tensor) -> bool:
    """Return False if any value is NaN or infinite, in one pass (0.03 s for 1 GiB on two cores)."""
    return first_not_finite([("", value)]) is None


def first_not_finite(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return the first name whose tensor has a value that is NaN or infinite. Wait once for each device and dtype."""
    names: list[str] = []
    ends: dict[tuple[torch.device, torch.dtype], dict[int, tuple[Tensor, Tensor]]] = {}
    for name, value in named:
        if value.numel() and value.is_floating_point():
            ends.setdefault((value.device, value.dtype), {})[len(names)] = torch.aminmax(value)
            names.append(name)
    faulty: list[int] = []
    for of_kind in ends.values():  # few kernels: a model has a thousand tensors, and each kernel's first call is slow
        values: list[float] = torch.stack([end for pair in of_kind.values() for end in pair]).tolist()
        pairs = zip(values[::2], values[1::2], strict=True)
        faulty += [number for number, pair in zip(of_kind, pairs, strict=True) if not all(map(math.isfinite, pair))]
    return names[min(faulty)] if faulty else None


def tensor_files(folder: Path, name: str = NAME) -> dict[str, str]:
    """Return the file of each tensor of a part, from the index beside ``name`` and the headers of files.

    An index may lack tensors of its files, as that of weights that were quantised since. Empty if there is no file.
    ValueError if a file is not a safetensors file.
    """
    if (index := _index(folder, name)) is not None:
        held = {key: file for file in sorted(set(index.values())) for key in tensor_names(folder / file)}
        return held | index
    if not (folder / name).is_file():
        return {}
    return dict.fromkeys(tensor_names(folder / name), name)


def tensor_names(file: Path) -> tuple[str, ...]:
    """Return the keys of a safetensors file. ValueError, with the file's name, if it is not one."""
    try:
        with safe_open(file, framework="pt") as opened:
            return tuple(opened.keys())
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is no safetensors file, or not the whole of one ({error})") from error


def metadata_of(file: Path) -> dict[str, str]:
    """Return the metadata in the header of a safetensors file. ValueError, with the file's name, if it is not one."""
    try:
        with safe_open(file, framework="pt") as opened:
            return opened.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is no safetensors file, or not the whole of one ({error})") from error


def files_of(folder: Path, name: str = NAME) -> tuple[Path, ...]:
    """Return the files of a model in diffusers' layout; none if there are no safetensors of the usual names."""
    if (index := _index(folder, name)) is not None:
        return tuple(folder / file for file in sorted(set(index.values())))
    return tuple(file for file in (folder / name,) if file.is_file())


def _index(folder: Path, name: str) -> dict[str, str] | None:
    """Return the file of each tensor; None without an index, or if the library prefers the file ``name``.

    If a single file has an index beside it, diffusers takes the index, and transformers the file.
    """
    file = folder / f"{name}.index.json"
    if not file.is_file() or (name != NAME and (folder / name).is_file()):
        return None
    try:
        weight_map: dict[str, str] = json.loads(file.read_text())["weight_map"]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{file} is no index of weights ({error}): download it again") from error
    return weight_map


def slices_of(module: nn.Module, plan: ShardPlan, axis: Axis) -> dict[str, Slice]:
    """Return the slices that a rank of a tensor axis reads for layers that ``split_weights`` divides.

    ``module`` is whole. Keys are the names of parameters after the split.
    """
    slices: dict[str, Slice] = {}
    for rule in plan.linears:
        for name in matching(module, rule):
            layer: Any = module.get_submodule(name)
            if isinstance(rule, RowLinear):
                ranges = shares(layer.in_features, rule.segments, axis)
                slices[f"{name}.partial.weight"] = Slice(name=f"{name}.weight", dim=1, ranges=ranges)
                continue
            if isinstance(rule, ColumnLinear):
                ranges = shares(layer.out_features, rule.segments, axis)
            else:
                part = share(layer.normalized_shape[0], axis)
                ranges = ((part.start, part.stop),)
            for leaf, _ in layer.named_parameters(recurse=False):
                slices[f"{name}.{leaf}"] = Slice(name=f"{name}.{leaf}", ranges=ranges)
    return slices
