"""Weights that are read slice by slice: a rank holds its share of a model that fits no single device."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from engines.core.shard_plan import ColumnLinear, RowLinear, ShardPlan
from engines.core.torch_private import has_persistent_buffer
from engines.parallel.collectives import Axis
from engines.parallel.tensor import matching, share, shares
from engines.quantization.scaled_files import check_format, find_scales, multiplied

NAME = "diffusion_pytorch_model.safetensors"
INDEX = f"{NAME}.index.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """The part of a tensor in a file that a parameter is made of: half-open ``ranges`` along ``dim``, or all of it."""

    name: str
    dim: int = 0
    ranges: tuple[tuple[int, int], ...] = ()

    def read(self, file: Any) -> Tensor:
        """Only what is wanted leaves the disk. The file gives views of a mapping of all of it: hence copies."""
        if not self.ranges:
            whole: Tensor = file.get_tensor(self.name)
            return whole
        source = file.get_slice(self.name)
        pieces = [source[start:stop] if self.dim == 0 else source[:, start:stop] for start, stop in self.ranges]
        return (
            pieces[0].clone(memory_format=torch.contiguous_format) if len(pieces) == 1 else torch.cat(pieces, self.dim)
        )

    def of_rows(self, scale: Tensor) -> Tensor:
        """The part of ``scale`` that belongs to the rows that are read."""
        if scale.numel() == 1 or not self.ranges or self.dim != 0:
            return scale
        return torch.cat([scale[start:stop] for start, stop in self.ranges])


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFiles:
    """Safetensors, whole or in shards with an index, in a folder per module; ``device`` is where weights go."""

    folders: Mapping[str, Path]
    device: torch.device

    def fill(
        self, name: str, module: nn.Module, slices: Mapping[str, Slice], leave_out: Collection[nn.Module] = ()
    ) -> None:
        """Give ``module`` (its parameters on "meta") its weights, but none to the modules in ``leave_out``.

        ``slices`` are those of parameters that are no whole tensor of the same name. ValueError if a tensor is not in
        the files, or has another shape.
        """
        left_out = {id(each) for unused in leave_out for each in unused.modules()}
        with ExitStack() as stack:
            files = _OpenFiles(self.folders[name], stack)
            for prefix, owner in module.named_modules():
                if id(owner) not in left_out:
                    self._fill_one(owner, prefix, slices, files)

    def _fill_one(self, owner: nn.Module, prefix: str, slices: Mapping[str, Slice], files: _OpenFiles) -> None:
        for leaf, parameter in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            name = f"{prefix}.{leaf}" if prefix else leaf
            value = self._read(files, slices.get(name, Slice(name=name)), parameter)
            owner.register_parameter(leaf, nn.Parameter(value, requires_grad=False))
        for leaf, buffer in list(owner.named_buffers(recurse=False, remove_duplicate=False)):
            name = f"{prefix}.{leaf}" if prefix else leaf
            if has_persistent_buffer(owner, leaf) and name in files.names:
                setattr(owner, leaf, self._read(files, slices.get(name, Slice(name=name)), buffer))
            else:
                setattr(owner, leaf, buffer.to(self.device))

    def _read(self, files: _OpenFiles, wanted: Slice, place: Tensor) -> Tensor:
        """In the dtype of its ``place``, on the device."""
        value = files.read(wanted)
        if value.shape != place.shape:
            raise ValueError(
                f"{files.file_of(wanted.name)} has {wanted.name} as {tuple(value.shape)}, which is "
                f"{tuple(place.shape)} here"
            )
        value = value.to(self.device, place.dtype)
        if not is_finite(value):
            raise ValueError(f"{files.file_of(wanted.name)} has values that are not finite in {wanted.name}")
        return value


class _OpenFiles:
    """The files of one folder, each opened at its first use."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self._stack = folder, stack
        self._open: dict[str, Any] = {}
        self._file_of = tensor_files(folder)
        if not self._file_of:
            raise ValueError(
                f"{folder} has neither {NAME} nor {INDEX}: weights can only be read slice by slice from those"
            )
        self._scales = find_scales(self.names)
        for name in self._scales.formats:
            check_format(name, self._read(Slice(name=name)))

    @property
    def names(self) -> Collection[str]:
        return self._file_of.keys()

    def file_of(self, name: str) -> Path:
        return self.folder / self._file_of[name]

    def read(self, wanted: Slice) -> Tensor:
        """float32 where the files have a scale beside the weight."""
        value = self._read(wanted)
        if (scale := self._scales.of_weight.get(wanted.name)) is None:
            return value
        return multiplied(value, wanted.of_rows(self._read(Slice(name=scale))), wanted.name)

    def _read(self, wanted: Slice) -> Tensor:
        if wanted.name not in self._file_of:
            file = INDEX if (self.folder / INDEX).is_file() else NAME
            raise ValueError(f"{self.folder / file} lists no tensor {wanted.name}")
        file = self._file_of[wanted.name]
        try:
            if file not in self._open:
                self._open[file] = self._stack.enter_context(safe_open(self.folder / file, framework="pt"))
            return wanted.read(self._open[file])
        except Exception as error:
            raise ValueError(f"{self.folder / file}: {wanted.name} cannot be read ({error})") from error


def is_finite(value: Tensor) -> bool:
    """Return False if any value is NaN or infinite. One pass (0.03 s for 1 GiB on two cores)."""
    if not value.numel() or not value.is_floating_point():
        return True
    return all(bool(torch.isfinite(end)) for end in torch.aminmax(value))


def tensor_files(folder: Path, name: str = NAME) -> dict[str, str]:
    """Return the file of each tensor of a part, by the index beside ``name`` or by that file's own header.

    Empty where there is neither. ValueError for a file that is no safetensors file.
    """
    if (index := _index(folder, name)) is not None:
        return index
    if not (folder / name).is_file():
        return {}
    return dict.fromkeys(tensor_names(folder / name), name)


def tensor_names(file: Path) -> tuple[str, ...]:
    """Return the keys of a safetensors file. ValueError, which names the file, if it is none."""
    try:
        with safe_open(file, framework="pt") as opened:
            return tuple(opened.keys())
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is no safetensors file, or not the whole of one ({error})") from error


def files_of(folder: Path, name: str = NAME) -> tuple[Path, ...]:
    """Returns the files of a model in diffusers' layout; none where it is in no safetensors of the usual names."""
    if (index := _index(folder, name)) is not None:
        return tuple(folder / file for file in sorted(set(index.values())))
    return tuple(file for file in (folder / name,) if file.is_file())


def _index(folder: Path, name: str) -> dict[str, str] | None:
    """Tensor to file; None if nothing says."""
    file = folder / f"{name}.index.json"
    if not file.is_file():
        return None
    weight_map: dict[str, str] = json.loads(file.read_text())["weight_map"]
    return weight_map


def slices_of(module: nn.Module, plan: ShardPlan, axis: Axis) -> dict[str, Slice]:
    """What a rank of a tensor axis reads for the layers that ``split_weights`` divides; ``module`` is whole.

    By the names that parameters have after the split.
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
                mine = share(layer.normalized_shape[0], axis)
                ranges = ((mine.start, mine.stop),)
            for leaf, _ in layer.named_parameters(recurse=False):
                slices[f"{name}.{leaf}"] = Slice(name=f"{name}.{leaf}", ranges=ranges)
    return slices
