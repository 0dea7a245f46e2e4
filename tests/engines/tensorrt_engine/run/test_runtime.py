"""The runtime works with the real bindings as far as a CPU allows, and its own logic with a fake."""

from __future__ import annotations

import ctypes
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engines.tensorrt_engine.build.bindings import load_bindings
from engines.tensorrt_engine.run import runtime
from engines.tensorrt_engine.run.runtime import (
    EngineRejectedError,
    EngineRunner,
    EnqueueError,
    LoadedEngine,
    communicator_capsule,
)
from tests.engines.tensorrt_engine.conftest import Build
from tests.engines.tensorrt_engine.support.one_layer import collective, collective_network

NO_DEVICE = not torch.cuda.is_available()


@pytest.mark.skipif(not NO_DEVICE, reason="says what happens without a device")
def test_a_real_engine_without_a_device_is_our_error(build_file: Build) -> None:
    engine_file = build_file(collective_network(collective("all_to_all"), "FLOAT16"))
    with pytest.raises(EngineRejectedError, match=r"cannot load the engine file: .*[Cc]uda"):
        runtime.deserialize(engine_file)


def test_garbage_is_our_error() -> None:
    with pytest.raises(EngineRejectedError, match="cannot load the engine file"):
        runtime.deserialize(b"no engine at all" * 100)


def test_capsule_holds_the_pointer_under_nvidias_name() -> None:
    capsule = communicator_capsule(0x1234)
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    assert get(capsule, b"ncclComm_t") == 0x1234
    with pytest.raises(ValueError, match="run one collective on it first"):
        communicator_capsule(0)


def test_the_bindings_have_what_the_runtime_calls() -> None:
    trt = load_bindings().api
    for name in ("set_communicator", "set_input_shape", "set_tensor_address", "get_tensor_shape", "execute_async_v3"):
        assert hasattr(trt.IExecutionContext, name)
    for name in ("num_io_tensors", "get_tensor_name", "get_tensor_mode", "get_tensor_dtype"):
        assert hasattr(trt.ICudaEngine, name)


class FakeContext:
    """Computes y = x + w at the bound addresses."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.addresses: dict[str, int] = {}
        self.shape: tuple[int, ...] = ()
        self.enqueues = True

    def set_communicator(self, capsule: object) -> bool:
        self.log.append("communicator")
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shape = shape
        return shape[0] <= 4

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.log.append(name)
        self.addresses[name] = address
        return name in ("x", "w", "y")

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.shape

    def execute_async_v3(self, stream: int) -> bool:
        view = {n: (ctypes.c_float * self.shape[0]).from_address(a) for n, a in self.addresses.items()}
        for i in range(self.shape[0]):
            view["y"][i] = view["x"][i] + view["w"][i]
        return self.enqueues


class FakeEngine:
    names = ("x", "w", "y")
    num_io_tensors = 3

    def __init__(self) -> None:
        self.context = FakeContext()

    def create_execution_context(self) -> FakeContext:
        return self.context

    def get_tensor_name(self, index: int) -> str:
        return self.names[index]

    def get_tensor_mode(self, name: str) -> Any:
        modes = load_bindings().api.TensorIOMode
        return modes.OUTPUT if name == "y" else modes.INPUT

    def get_tensor_dtype(self, name: str) -> Any:
        return load_bindings().api.DataType.FLOAT


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    made = FakeEngine()
    monkeypatch.setattr(runtime, "deserialize", lambda engine_file: made)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, device, **kwargs: empty(*args, **kwargs))
    return made


def test_weights_are_bound_once_and_activations_in_place(engine: FakeEngine) -> None:
    weight, x = torch.full((4,), 10.0), torch.arange(4.0)
    runner = EngineRunner(LoadedEngine(b""), {"w": weight}, communicator=5)
    assert engine.context.log == ["communicator", "w"]
    for _ in range(2):
        assert runner.run({"x": x})["y"].tolist() == [10, 11, 12, 13]
    assert engine.context.addresses["x"] == x.data_ptr()
    assert engine.context.addresses["w"] == weight.data_ptr()
    assert engine.context.log.count("w") == 1


def test_a_team_of_one_needs_no_communicator(engine: FakeEngine) -> None:
    EngineRunner(LoadedEngine(b""), {"w": torch.zeros(4)})
    assert engine.context.log == ["w"]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"x": torch.zeros(5)}, "profile excludes"),
        ({"x": torch.zeros(4, dtype=torch.float16)}, "x is torch.float16, the engine expects torch.float32"),
        ({"z": torch.zeros(4)}, "cannot bind z"),
    ],
)
def test_wrong_inputs_are_errors_before_the_enqueue(engine: FakeEngine, inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(EnqueueError, match=message):
        EngineRunner(LoadedEngine(b""), {"w": torch.zeros(4)}).run(inputs)


def test_a_failed_enqueue_raises_and_survives_pickling(engine: FakeEngine) -> None:
    engine.context.enqueues = False
    with pytest.raises(EnqueueError, match="could not enqueue") as caught:
        EngineRunner(LoadedEngine(b""), {"w": torch.zeros(4)}).run({"x": torch.zeros(4)})
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_refused_communicator_is_an_error(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.context, "set_communicator", lambda capsule: False)
    with pytest.raises(EngineRejectedError, match="would not take the NCCL communicator"):
        EngineRunner(LoadedEngine(b""), {}, communicator=5)


def test_close_lets_go_of_context_and_engine(engine: FakeEngine) -> None:
    runner = EngineRunner(LoadedEngine(b""), {"w": torch.zeros(4)})
    runner.close()
    assert runner._context is None
    assert runner._engine is None
