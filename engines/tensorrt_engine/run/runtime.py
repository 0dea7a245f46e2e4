"""TensorRT's runtime (engines, contexts, communicators), and preflight checks of a gang's ranks."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engines.core.torch_private import nccl_communicator, process_group
from engines.tensorrt_engine.build.bindings import Target, load_bindings, take_errors, trt_logger
from engines.tensorrt_engine.build.caches import CachedEngine
from engines.tensorrt_engine.run.nccl import check_process, library_version

CAPSULE_NAME = b"ncclComm_t"  # global: a capsule does not copy its name


class EngineRejectedError(RuntimeError):
    """TensorRT cannot load an engine file, or cannot run it on this device."""


class EnqueueError(RuntimeError):
    """This rank could not start its part of a step. The other ranks wait for it until the step's deadline."""


def communicator_capsule(pointer: int) -> object:
    """Return the argument of ``set_communicator``: a capsule named ``ncclComm_t`` of the pointer."""
    if pointer == 0:
        raise ValueError("the process group has no NCCL communicator yet: run one collective on it first")
    new = ctypes.pythonapi.PyCapsule_New
    new.restype = ctypes.py_object
    new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    capsule: object = new(pointer, CAPSULE_NAME, None)
    return capsule


def deserialize(engine_file: bytes) -> Any:
    """Return an ``ICudaEngine``. Raises EngineRejectedError with TensorRT's reason."""
    trt = load_bindings().api
    take_errors()
    runtime = trt.Runtime(trt_logger())
    engine = runtime.deserialize_cuda_engine(engine_file)
    if engine is None:
        reason = take_errors() or "no reason given"
        bindings = load_bindings()
        raise EngineRejectedError(f"{bindings.product} {bindings.version} cannot load the engine file: {reason}")
    return engine


class LoadedEngine:
    """An engine on this device, shared by the runners of all its shapes and released with the last of them."""

    def __init__(self, engine_file: bytes) -> None:
        self._engine: Any = deserialize(engine_file)
        self._num_users = 0

    @property
    def is_released(self) -> bool:
        return self._engine is None

    def acquire(self) -> Any:
        """Return the ``ICudaEngine`` to another user."""
        assert self._engine is not None, "released"
        self._num_users += 1
        return self._engine

    def release(self) -> None:
        self._num_users -= 1
        if self._num_users == 0:
            self._engine = None


class EngineRunner:
    """One execution context of an engine on one rank. Weights are bound once, activations at each run, without copies.

    Creation and runs are collective if there is a communicator. Raises EngineRejectedError, EnqueueError.
    """

    def __init__(self, loaded: LoadedEngine, weights: Mapping[str, Tensor], *, communicator: int | None = None) -> None:
        self._loaded = loaded
        self._engine = loaded.acquire()
        self._context = self._engine.create_execution_context()
        if self._context is None:
            raise EngineRejectedError(f"no execution context: {take_errors() or 'out of device memory?'}")
        if communicator is not None and not self._context.set_communicator(communicator_capsule(communicator)):
            raise EngineRejectedError(f"TensorRT would not take the NCCL communicator: {take_errors()}")
        self._weights = {name: tensor.contiguous() for name, tensor in weights.items()}  # bound by address: keep alive
        for name, tensor in self._weights.items():
            self._bind(name, tensor)
        self._outputs = tuple(self._names(load_bindings().api.TensorIOMode.OUTPUT))

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Enqueue on the current stream, and return outputs that are valid in stream order."""
        bound = {name: tensor.contiguous() for name, tensor in inputs.items()}
        for name, tensor in bound.items():
            if not self._context.set_input_shape(name, tuple(tensor.shape)):
                raise EnqueueError(f"input {name} has shape {tuple(tensor.shape)}, which the engine's profile excludes")
            self._bind(name, tensor)
        outputs = {name: self._allocate(name) for name in self._outputs}
        for name, tensor in outputs.items():
            self._bind(name, tensor)
        if not self._context.execute_async_v3(torch.cuda.current_stream().cuda_stream):
            raise EnqueueError(f"TensorRT could not enqueue the step: {take_errors() or 'no reason given'}")
        return outputs

    def close(self) -> None:
        """Release the context, then the engine. The communicator must still be alive."""
        self._context = None
        self._engine = None
        self._loaded.release()
        self._weights.clear()

    def _bind(self, name: str, tensor: Tensor) -> None:
        expected = _torch_dtype(self._engine.get_tensor_dtype(name))
        if tensor.dtype != expected:
            raise EnqueueError(f"{name} is {tensor.dtype}, the engine expects {expected}")
        if not self._context.set_tensor_address(name, tensor.data_ptr()):
            raise EnqueueError(f"TensorRT cannot bind {name}: {take_errors() or 'no such tensor in the engine'}")

    def _allocate(self, name: str) -> Tensor:
        shape = tuple(self._context.get_tensor_shape(name))
        return torch.empty(shape, dtype=_torch_dtype(self._engine.get_tensor_dtype(name)), device="cuda")

    def _names(self, mode: Any) -> list[str]:
        names = [self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)]
        return [name for name in names if self._engine.get_tensor_mode(name) == mode]


def _torch_dtype(dtype: Any) -> torch.dtype:
    kinds = load_bindings().api.DataType
    return {
        kinds.FLOAT: torch.float32,
        kinds.HALF: torch.float16,
        kinds.BF16: torch.bfloat16,
        kinds.INT8: torch.int8,
        kinds.INT32: torch.int32,
        kinds.INT64: torch.int64,
        kinds.BOOL: torch.bool,
        kinds.FP8: torch.float8_e4m3fn,
    }[dtype]


class PreflightError(RuntimeError):
    """A rank cannot take part. The message names the rank, what it found and what was expected. Picklable."""

    def __init__(self, rank: int, what: str, found: str, expected: str) -> None:
        super().__init__(rank, what, found, expected)
        self.rank, self.what, self.found, self.expected = rank, what, found, expected

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.what}: found {self.found}, expected {self.expected}"


def current_target(rank: int) -> Target:
    """Return the GPU of this process. Raises PreflightError without one."""
    if not torch.cuda.is_available():
        raise PreflightError(rank, "a TensorRT engine runs on a GPU", "none", "one; or engine: torch")
    major, minor = torch.cuda.get_device_capability()
    return Target(major=major, minor=minor)


def check_engine_file(engine: CachedEngine, *, rank: int, target: Target) -> None:
    """Raise PreflightError for an engine of another compute capability or another TensorRT version."""
    if engine.key.target != target.name:
        raise PreflightError(rank, f"{engine.path.name} is for another GPU", engine.key.target, target.name)
    bindings = load_bindings()
    builder, installed = f"{engine.key.product} {engine.key.version}", f"{bindings.product} {bindings.version}"
    if builder != installed:
        raise PreflightError(rank, f"{engine.path.name} is another TensorRT's", builder, installed)


def check_same_engine_file(sha256: str, *, rank: int, group: str) -> None:
    """Raise PreflightError on every rank of ``group`` if their engine files differ. Collective."""
    fact = {"its engine file is not that of the rest of its team": sha256[:12]}
    _compare(fact, rank=rank, group=process_group(group))


def check_same_facts(facts: Mapping[str, str], *, rank: int) -> None:
    """Raise PreflightError on every rank of the gang if their ``facts`` differ. Collective."""
    assert dist.group.WORLD is not None
    sentences = {f"its {name} is not that of the rest of the gang": value for name, value in facts.items()}
    _compare(sentences, rank=rank, group=dist.group.WORLD)


def _compare(facts: Mapping[str, str], *, rank: int, group: dist.ProcessGroup) -> None:
    facts_by_rank: list[Any] = [None] * group.size()
    dist.all_gather_object(facts_by_rank, (rank, dict(facts)), group=group)
    (first, expected), *others = facts_by_rank
    for other, values in others:
        for what, value in expected.items():
            if values.get(what) != value:
                raise PreflightError(other, what, str(values.get(what)), f"{value} (rank {first}'s)")


def check_nccl(rank: int) -> str:
    """Return the version of the process's NCCL. PreflightError if TensorRT cannot use it."""
    try:
        library = check_process()
    except RuntimeError as error:
        raise PreflightError(rank, "NCCL", str(error), "only torch's, 2.19 or later") from None
    return ".".join(map(str, library_version(library)))


def communicator(group: str, device: torch.device) -> int:
    """Return the address of the group's ``ncclComm_t``, which its first collective creates."""
    return nccl_communicator(process_group(group), device)
