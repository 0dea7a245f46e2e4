"""A fake device for tests that behaves like a GPU towards its host.

Its tensors have their values on the CPU, or none ("meta": shapes alone, for weights of large models). An operation that
mixes host and device tensors fails as with CUDA. Operations that a CUDA graph refuses are recorded: copies from and to
the host, tensors of Python values, values and sizes that are read back.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

GPU = torch.device("lazy", 0)
"""A device type without a backend, so that torch starts nothing."""
_aten = torch.ops.aten
READS = {_aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default}
MAX_VALUES = 10**7
"""Zeros of more elements have shapes alone: they would take gigabytes."""
SIZED_BY_VALUES = {_aten.nonzero.default, _aten.masked_select.default, _aten._unique2.default}
INDEXED = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default}


class OtherDeviceError(RuntimeError):
    """The error that CUDA words "Expected all tensors to be on the same device"."""


class GpuTensor(Tensor):
    """Has ``values`` on the CPU or on "meta", and claims to be on ``GPU``."""

    values: Tensor  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, values: Tensor) -> GpuTensor:
        how: dict[str, Any] = {"strides": values.stride(), "storage_offset": values.storage_offset()}
        made = Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype, device=GPU, **how)
        made.values = values
        return made

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {}, [])


class PretendGpu(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes tensors on ``GPU`` ``GpuTensor``; ``found`` is what ``recording`` would have refused."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []
        self._is_recording = False

    def __enter__(self) -> PretendGpu:
        self._lifted = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # or torch.tensor(..., device=GPU) would ask for a backend
        self._patched = (
            patch.multiple(torch, autocast=_autocast, tensor=_tensor),
            patch.object(torch.amp, "autocast", _autocast),
        )
        for each in self._patched:
            each.start()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for each in self._patched:
            each.stop()
        torch._C._set_only_lift_cpu_tensors(self._lifted)

    @contextmanager
    def recording(self) -> Iterator[None]:
        self._is_recording = True
        try:
            yield
        finally:
            self._is_recording = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not types and not _is_gpu((kwargs or {}).get("device")):  # host tensors only
            return func(*args, **(kwargs or {}))
        noted: list[str] = []
        try:
            return _run(func, args, kwargs or {}, noted)
        finally:
            if self._is_recording and noted:
                self.found += [f"{what} at {_place()}" for what in noted]


def _autocast(device_type: str, enabled: bool = True, **how: Any) -> AbstractContextManager[Any]:
    """Replace torch's own, which knows no devices without a backend."""
    assert not enabled, "models are served in their own dtypes"
    return nullcontext()


_of_values = torch.tensor
with torch.device("cpu"):
    torch.empty(0)  # such a context looks its functions up once: it must find torch's own


def _tensor(data: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Read numbers of the device back, like ``torch.tensor`` with those in a list."""
    return _of_values(tree_map(lambda x: x.item() if isinstance(x, GpuTensor) else x, data), *args, **kwargs)


def put_on_gpu(module: nn.Module) -> None:
    """Make parameters and buffers tensors of ``GPU``. Other tensors stay on the host, as with ``to``."""
    for each in module.modules():
        both: tuple[dict[str, Any], ...] = (each._parameters, each._buffers)
        for tensors in both:
            for name, x in tensors.items():
                if x is not None and not isinstance(x, GpuTensor):
                    made = GpuTensor(x.detach())
                    tensors[name] = nn.Parameter(made, requires_grad=False) if tensors is each._parameters else made


def _run(func: Any, args: Any, kwargs: Mapping[str, Any], noted: list[str]) -> Any:
    """Run ``func`` where the values are, and add to ``noted`` what a graph cannot record of it."""
    tensors = [*_tensors_of((args, kwargs))]
    mine = [x for x in tensors if isinstance(x, GpuTensor)]
    asked = kwargs.get("device")
    target = None if asked is None else _is_gpu(asked)
    noted += _refused(func, args, kwargs, tensors, mine, target)
    has_shapes_alone = any(x.values.is_meta for x in mine)
    owners = {id(x.values): x for x in mine}

    def inner(x: Tensor) -> Tensor:
        values = x.values if isinstance(x, GpuTensor) else x
        return values.to("meta") if has_shapes_alone and values.ndim and not values.is_meta else values

    named = dict(_mapped(inner, kwargs))
    if target or (mine and asked is not None):
        is_vast = func is _aten.zeros.default and math.prod(args[0]) > MAX_VALUES
        is_light = has_shapes_alone or is_vast or any(x.is_meta for x in tensors)
        named["device"] = torch.device("meta" if is_light else "cpu")
    if func is _aten.repeat_interleave.Tensor and has_shapes_alone:
        raise RuntimeError("repeat_interleave without output_size")
    result = func(*_mapped(inner, args), **named)
    on_gpu = target if target is not None else bool(mine)

    def outer(x: Tensor) -> Tensor:
        return owners[id(x)] if id(x) in owners else GpuTensor(x) if on_gpu else x

    return _mapped(outer, result)


def _tensors_of(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of an operation's arguments; pytrees would take half of a job's time."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, tuple | list):
        for each in tree:
            yield from _tensors_of(each)
    elif isinstance(tree, dict):
        yield from _tensors_of([*tree.values()])


def _mapped(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Return ``tree`` with the results of ``function`` in place of its tensors."""
    if isinstance(tree, Tensor):
        return function(tree)
    if type(tree) in (tuple, list):
        return type(tree)([_mapped(function, each) for each in tree])
    if type(tree) is dict:
        return {key: _mapped(function, each) for key, each in tree.items()}
    if isinstance(tree, tuple | list | dict):  # named fields
        return tree_map(lambda x: function(x) if isinstance(x, Tensor) else x, tree)
    return tree


def _is_gpu(device: Any) -> bool:
    return device is not None and torch.device(device).type == GPU.type


def _refused(
    func: Any, args: Any, kwargs: Mapping[str, Any], tensors: list[Tensor], mine: list[GpuTensor], target: bool | None
) -> list[str]:
    """Return what a graph cannot record. Raise ``OtherDeviceError`` where CUDA fails in any case."""
    host = [x for x in tensors if not isinstance(x, GpuTensor) and x.ndim]
    if target and kwargs.get("generator") is not None:
        raise OtherDeviceError("a generator of the host draws on the device")
    if func is _aten.copy_.default:
        return _copied(args[0], isinstance(args[1], GpuTensor), isinstance(args[0], GpuTensor))
    if func is _aten._to_copy.default:
        return _copied(
            args[0], isinstance(args[0], GpuTensor), isinstance(args[0], GpuTensor) if target is None else target
        )
    if not mine:
        return []
    if func in READS:
        return ["a value is read back"]
    if func in INDEXED:
        return _indexed(*args)
    if host:
        shapes = ", ".join(str(tuple(x.shape)) for x in host)
        raise OtherDeviceError(f"{func} of a tensor of the device and of one of the host, {shapes}")
    is_sized = func in SIZED_BY_VALUES or (func is _aten.repeat_interleave.Tensor and not kwargs.get("output_size"))
    return ["a size is read back"] if is_sized else []


def _copied(x: Tensor, from_gpu: bool, to_gpu: bool) -> list[str]:
    if from_gpu == to_gpu or not x.numel():
        return []
    return [f"{tuple(x.shape)} is copied {'from' if to_gpu else 'to'} the host"]


def _indexed(x: Tensor, indices: list[Tensor | None], value: Tensor | None = None, *_: Any) -> list[str]:
    """Return what a graph refuses: a mask becomes numbers, unless one value is written."""
    present = [index for index in indices if index is not None]
    others = [*present, value] if value is not None and value.ndim else present
    if not isinstance(x, GpuTensor) and any(isinstance(other, GpuTensor) for other in others):
        raise OtherDeviceError("a tensor of the host is indexed by, or given, values of the device")
    if value is not None and value.ndim and not isinstance(value, GpuTensor):
        raise OtherDeviceError("a tensor of the device is given values of the host")
    is_masked = any(index.dtype in (torch.bool, torch.uint8) for index in present)
    noted = [
        f"an index {tuple(index.shape)} is copied from the host"
        for index in present
        if not isinstance(index, GpuTensor)
    ]
    return [*noted, *(["a size is read back"] if is_masked and (value is None or value.numel() > 1) else [])]


def _place() -> str:
    frames = (frame for frame in traceback.extract_stack() if "/torch/" not in frame.filename)
    *_, last = (frame for frame in frames if frame.filename != __file__)
    return f"{last.filename.rpartition('site-packages/')[2]}:{last.lineno}: {last.line}"
