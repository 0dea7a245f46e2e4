"""Weights that are read slice by slice: a rank holds its share of a model that fits no single device."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from engines.core.shard_plan import ColumnLinear, RowLinear, ShardPlan
from engines.parallel.communication.collectives import Axis
from engines.parallel.tensor import matching, share, shares

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
        source = file.get_slice(self.name)
        if not self.ranges:
            whole: Tensor = source[:]
            return whole
        pieces = [source[start:stop] if self.dim == 0 else source[:, start:stop] for start, stop in self.ranges]
        return (
            pieces[0].clone(memory_format=torch.contiguous_format) if len(pieces) == 1 else torch.cat(pieces, self.dim)
        )


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
        for leaf, parameter in owner._parameters.items():
            if parameter is not None:
                name = f"{prefix}.{leaf}" if prefix else leaf
                value = files.read(slices.get(name, Slice(name=name)))
                if value.shape != parameter.shape:
                    raise ValueError(f"{name} is {tuple(value.shape)} in the files, and {tuple(parameter.shape)} here")
                value = value.to(self.device, parameter.dtype)
                owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)
        for leaf, buffer in owner._buffers.items():
            owner._buffers[leaf] = None if buffer is None else buffer.to(self.device)


class _OpenFiles:
    """The files of one folder, each opened at its first use."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._open: dict[str, Any] = {}
        self._file_of = _index(folder)
        if self._file_of is None and not (folder / NAME).is_file():
            raise ValueError(
                f"{folder} has neither {NAME} nor {INDEX}: weights can only be read slice by slice from those"
            )

    def read(self, wanted: Slice) -> Tensor:
        file = NAME if self._file_of is None else self._file_of.get(wanted.name, "")
        if file not in self._open:
            if not file:
                raise ValueError(f"{self._folder / INDEX} lists no tensor {wanted.name}")
            self._open[file] = self._stack.enter_context(safe_open(self._folder / file, framework="pt"))
        try:
            return wanted.read(self._open[file])
        except Exception as error:
            raise ValueError(f"{self._folder / file}: {wanted.name} cannot be read ({error})") from error


def files_of(folder: Path) -> tuple[Path, ...]:
    """Returns the files of a model in diffusers' layout; none where it is in no safetensors of the usual names."""
    if (index := _index(folder)) is not None:
        return tuple(folder / name for name in sorted(set(index.values())))
    return tuple(file for file in (folder / NAME,) if file.is_file())


def _index(folder: Path) -> dict[str, str] | None:
    """Tensor to file; None if nothing says."""
    if not (folder / INDEX).is_file():
        return None
    weight_map: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
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
            for leaf in layer._parameters:
                slices[f"{name}.{leaf}"] = Slice(name=f"{name}.{leaf}", ranges=ranges)
    return slices
