"""Load weights from safetensors files onto a GPU, by ``engines.parallel.file_reading``.

The format: https://huggingface.co/docs/safetensors/index#format.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from engines.core.logs import log_phase
from engines.parallel.collectives import Axis
from engines.parallel.file_reading import Span, SpanReader
from engines.parallel.mesh import ALONE
from engines.parallel.weight_files import metadata_of, tensor_names
from engines.quantization.scaled_files import find_formats, find_scales, scaled_weight

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
MAX_HEADER_BYTES = 10**8
"""The format's limit; other files (a pointer of Git LFS) may start with any length."""
GROUP_BYTES = 2**30
"""Read at a time where a library casts tensors: enough for all threads."""


def fill(
    module: nn.Module, files: Iterable[Path], device: torch.device, on_host: Collection[str] = (), axis: Axis = ALONE
) -> None:
    """Load ``files`` into ``module``, whose parameters are on "meta", on ``device`` and in the parameters' dtypes.

    The weights ``on_host`` stay in the mapped files, which take no memory, until a layer is quantised. Scaled eight-bit
    weights are dequantised (``engines.quantization.scaled_files``). The ranks of ``axis`` read the files together: all
    make this call. ValueError, on all ranks, if tensors and parameters do not match; discard ``module`` then.
    """
    dtypes = {name: value.dtype for name, value in module.state_dict().items()}
    every = tuple(files)
    scales = find_scales(name for file in every for name, *_ in _contents(file))
    values: dict[str, Tensor] = {}
    with SpanReader(device, axis) as reader:
        for file in every:  # one at a time: tensors of other dtypes take double memory until their conversion
            read = read_spans(file, reader, on_host)
            while read:
                name, value = read.popitem()
                is_scaled = name in scales.of_weight or name in scales.beside  # a scale may be in another file
                values[name] = value if is_scaled else value.to(dtypes.get(name, value.dtype))
    log_phase("load: files", reader.read_s, num_bytes=reader.read_bytes)
    if axis.size > 1:
        log_phase("load: exchange", reader.exchange_s, num_bytes=reader.exchanged_bytes, num_ranks=axis.size)
    formats = find_formats(scales, values.__getitem__, map(metadata_of, every))
    for name in scales.of_weight:
        whole = scaled_weight(name, scales, formats, values.__getitem__)
        values[name] = whole.to(dtypes.get(name, torch.float32))
    values = {name: value for name, value in values.items() if name not in scales.beside}
    try:
        module.load_state_dict(values, assign=True)
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    move_buffers(module, device)  # computed ones, which no file has


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move the buffers of ``module`` to ``device``, but no parameter."""
    for part in module.modules():
        for name, buffer in list(part.named_buffers(recurse=False)):
            setattr(part, name, buffer.to(device))


def read_tensors(
    path: Path, device: torch.device, on_host: Collection[str] = (), only: Collection[str] | None = None
) -> dict[str, Tensor]:
    """Return all tensors by name, or those of ``only``. Tensors ``on_host`` are views of the mapped file.

    OSError, or ValueError if the file is invalid or truncated.
    """
    with SpanReader(device) as reader:
        return read_spans(path, reader, on_host, only)


def read_spans(
    path: Path, reader: SpanReader, on_host: Collection[str] = (), only: Collection[str] | None = None
) -> dict[str, Tensor]:
    """Do as ``read_tensors``. Ranks that read together find the same fault before any of them waits for another."""
    contents = [one for one in _contents(path) if only is None or one[0] in only]
    tensors = _mapped(path, [name for name, *_ in contents if name in on_host])
    spans: list[Span] = []
    with path.open("rb", buffering=0) as file:
        for name, dtype, shape, offset in contents:
            if name not in tensors:
                tensors[name] = torch.empty(shape, dtype=dtype, device=reader.device)
                target_B = tensors[name].view(-1).view(torch.uint8)
                spans.append(Span(file=file.fileno(), offset=offset, target_B=target_B))
        missing = max((span.offset + span.num_bytes for span in spans), default=0) - os.fstat(file.fileno()).st_size
        if missing > 0:
            raise ValueError(f"a file of weights ends {missing} bytes before its last tensor does")
        reader.read(spans)
    return tensors


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor that ``FileTensors`` reads when it is indexed by ``...``, as slices of safetensors are."""

    name: str
    """Key in the file."""
    take: Callable[[str], Tensor]
    """Returns the tensor of a key, on the device."""

    def __getitem__(self, _: object) -> Tensor:
        return self.take(self.name)


class FileTensors:
    """The tensors of ``files``, on ``device``, read in groups of ``GROUP_BYTES`` once one of a group is needed.

    Groups follow the natural order of names, in which transformers takes tensors: a model that is cast needs memory for
    about one group more. Tensors belong to their taker, so those that a library casts are released one by one. Threads
    may take tensors at the same time. ValueError for a file that is invalid or truncated.
    """

    def __init__(self, files: Iterable[Path], device: torch.device) -> None:
        self._group_of = {name: (file, group) for file in files for group in _groups(file) for name in group}
        self._device = device
        self._read: dict[str, Tensor] = {}
        self._lock = Lock()

    def lazy(self) -> dict[str, FileTensor]:
        """Return all tensors by name, not read yet."""
        return {name: FileTensor(name, self._take) for name in self._group_of}

    def _take(self, name: str) -> Tensor:
        with self._lock:
            if name not in self._read:
                file, group = self._group_of[name]
                self._read |= read_tensors(file, self._device, only=group)
            return self._read.pop(name)


def _groups(path: Path) -> list[set[str]]:
    """Return the names of a file's tensors in groups. ValueError for a file that is invalid or truncated."""
    names = tensor_names(path)
    sizes = {name: dtype.itemsize * prod(shape) for name, dtype, shape, _ in _contents(path)}
    groups, num_bytes = list[set[str]](), 0
    for name in sorted(names, key=_natural):
        if not groups or num_bytes + sizes[name] > GROUP_BYTES:
            groups.append(set())
            num_bytes = 0
        groups[-1].add(name)
        num_bytes += sizes[name]
    return groups


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Return the key of the order in which ``layers.2`` comes before ``layers.10``."""
    return [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]


def _mapped(path: Path, names: Collection[str]) -> dict[str, Tensor]:
    if not names:
        return {}
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file, or not the whole of one ({error})") from error


def _contents(path: Path) -> Iterator[tuple[str, torch.dtype, list[int], int]]:
    """Yield name, dtype, shape and file offset of each tensor, in file order."""
    with path.open("rb") as file:
        try:
            (length,) = struct.unpack("<Q", file.read(8))
            header: dict[str, Any] = json.loads(file.read(min(length, MAX_HEADER_BYTES)))
            header.pop("__metadata__", None)
            entries = sorted((entry["data_offsets"][0], name, entry) for name, entry in header.items())
            for begin, name, entry in entries:
                yield name, DTYPES[entry["dtype"]], entry["shape"], 8 + length + begin
        except (struct.error, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no safetensors file of a known format ({error!r})") from error
