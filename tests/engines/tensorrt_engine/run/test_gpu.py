"""On a GPU, without TensorRT 11: an engine's communicator, and a step captured and replayed."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from engines.tensorrt_engine.run.nccl import check_process
from engines.tensorrt_engine.run.runtime import CAPSULE_NAME, communicator, communicator_capsule

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[str]:
    store = dist.FileStore(str(tmp_path / "store"), 1)  # type: ignore[attr-defined]
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    dist.all_reduce(torch.ones(1, device="cuda"))
    assert dist.group.WORLD is not None
    yield str(dist.group.WORLD.group_name)
    dist.destroy_process_group()


def test_the_capsule_holds_a_communicator_that_nccl_knows(group: str) -> None:
    pointer = communicator(group, torch.device("cuda", 0))
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    assert get(communicator_capsule(pointer), CAPSULE_NAME) == pointer
    num_ranks = ctypes.c_int()
    library = ctypes.CDLL(str(check_process()))
    assert library.ncclCommCount(ctypes.c_void_p(pointer), ctypes.byref(num_ranks)) == 0
    assert num_ranks.value == 1
