"""Weights go to the host and return as the same bytes and tensors, and nothing is copied twice."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch
from weakref import ReferenceType, ref

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from engines.core import host_copy
from engines.core.host_copy import HostCopy, HostPiece, RegisteredMemory, pinned_memory, touched_memory
from engines.core.weight_memory import WeightMemory
from engines.core.weight_spans import CudaSpans, _runs_in_use

CPU = torch.device("cpu")


class Parts(nn.Module):
    def __init__(self, num: int, columns: int, rows: int, *, bias: bool) -> None:
        super().__init__()
        self.layers = [nn.Linear(columns, rows, bias=bias).requires_grad_(False) for _ in range(num)]
        for i, layer in enumerate(self.layers):
            self.add_module(str(i), layer)

    def __getitem__(self, index: int) -> nn.Linear:
        return self.layers[index]


def parts(num: int = 3) -> Parts:
    torch.manual_seed(0)
    return Parts(num, 40, 30, bias=True)


def opened(folder: Path, module: nn.Module) -> WeightMemory:
    memory = WeightMemory()
    memory.open(CPU, folder)
    memory.hold(module)
    return memory


def values(module: nn.Module) -> list[Tensor]:
    return [x.clone() for x in module.state_dict().values()]


def assert_same(module: nn.Module, before: list[Tensor]) -> None:
    assert all(x.equal(y) for x, y in zip(module.state_dict().values(), before, strict=True))


def test_weights_leave_and_come_back_in_the_same_tensors(tmp_path: Path) -> None:
    module = parts()
    before, rows = values(module), module[0].weight[3:5]
    memory = opened(tmp_path, module)
    for _ in range(2):
        memory.sleep()
        assert {x.untyped_storage().nbytes() for x in module.parameters()} == {0}
        memory.sleep()  # no effect
        memory.wake()
        assert_same(module, before)
        assert rows.equal(before[0][3:5]), "a view has its values too"
    assert memory.num_copies == 1, "the weights are unchanged"


def test_new_weights_are_copied_again(tmp_path: Path) -> None:
    module, other = parts(), parts(1)
    memory = opened(tmp_path, module)
    memory.sleep()
    memory.wake()
    module[0].weight.zero_()
    memory.hold(other)
    before = values(module)
    memory.sleep()
    assert other[0].weight.untyped_storage().nbytes() == 0
    memory.wake()
    assert_same(module, before)
    assert memory.num_copies == 2


def with_freed_memory(folder: Path) -> tuple[Parts, list[Tensor], WeightMemory]:
    """Return a module, its earlier values, and its memory, which has slept beside a module since deleted."""
    module, other = parts(), parts(1)
    before = values(module)
    memory = opened(folder, other)
    memory.hold(module)
    memory.sleep()
    memory.wake()
    del other
    gc.collect()
    return module, before, memory


def test_memory_that_was_freed_is_not_restored(tmp_path: Path) -> None:
    module, before, memory = with_freed_memory(tmp_path)
    memory.sleep()
    assert memory.use().weights == sum(x.nbytes for x in before)
    memory.wake()
    assert_same(module, before)


def test_a_copy_that_failed_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, before, memory = with_freed_memory(tmp_path)
    with monkeypatch.context() as failing:
        failing.setattr(HostCopy, "copy", Mock(side_effect=OSError("full")))
        with pytest.raises(OSError, match="full"):
            memory.sleep()
    memory.sleep()
    memory.wake()
    assert_same(module, before)


def test_changes_are_undone_before_sleep_and_an_undo_can_be_taken_back(tmp_path: Path) -> None:
    module = parts()
    before = values(module)
    memory = opened(tmp_path, module)

    def undo() -> None:
        module[0].weight.copy_(before[0])

    memory.before_sleep(undo)
    for copies in (1, 1):
        module[0].weight.zero_()
        memory.sleep()
        memory.wake()
        assert_same(module, before)
        assert memory.num_copies == copies
    memory.forget(undo)
    module[0].weight.zero_()
    memory.sleep()
    assert not memory._undo


def test_mapped_files_and_shared_storages(tmp_path: Path) -> None:
    save_file({"weight": torch.arange(12.0).view(3, 4)}, tmp_path / "w.safetensors")
    module = Parts(2, 4, 3, bias=False)
    mapped = torch.from_file(str(tmp_path / "w.safetensors"), size=24)
    assert not mapped.untyped_storage().resizable()
    module[0].weight.data, module[1].weight.data = mapped[:12].view(3, 4), mapped[12:].view(3, 4)
    before = values(module)
    memory = opened(tmp_path, module)
    assert memory.use().weights == 24 * 4, "one storage, counted once"
    memory.sleep()
    memory.wake()
    assert_same(module, before)
    assert module[0].weight.untyped_storage().data_ptr() == module[1].weight.untyped_storage().data_ptr()
    assert load_file(tmp_path / "w.safetensors")["weight"].equal(torch.arange(12.0).view(3, 4))


@pytest.fixture
def small_pieces() -> Iterator[None]:
    with patch.object(host_copy, "PIECE_BYTES", 1000):
        yield


@pytest.mark.parametrize(("limit", "pinned"), [(None, 14760), (0, 0), (2500, 2500)])
def test_host_memory_is_pinned_up_to_its_limit(
    tmp_path: Path, small_pieces: None, limit: int | None, pinned: int
) -> None:
    """Pieces are smaller than spans, and the last pinned one is smaller than others."""
    module = parts()
    before = values(module)
    memory = opened(tmp_path / "new", module)
    memory.reserve(limit)
    memory.sleep()
    memory.wake()
    assert_same(module, before)
    assert (memory.use().weights, memory.use().pinned) == (14760, pinned)
    assert not list((tmp_path / "new").iterdir() if limit is not None else []), "files have no names"


def test_a_full_disk_is_an_error_before_weights_are_gone(tmp_path: Path) -> None:
    module = parts()
    before = values(module)
    memory = opened(tmp_path, module)
    memory.reserve(0)
    with patch("os.posix_fallocate", side_effect=OSError(28, "No space left on device")):
        other = opened(tmp_path, module)
        other.reserve(0)
        with pytest.raises(OSError, match="No space"):
            other.sleep()
    assert_same(module, before)


def test_copies_that_grow_keep_their_limit(tmp_path: Path) -> None:
    host = HostCopy(CPU, tmp_path)
    host.reserve(100, pinned_bytes=150)
    host.reserve(300, pinned_bytes=150)
    assert (host.num_bytes, host.pinned_bytes) == (300, 150)


def addresses(memory: WeightMemory) -> list[int]:
    assert memory._host is not None
    return [piece.bytes_B.data_ptr() for piece in memory._host._wait() if piece.is_pinned]


@pytest.mark.parametrize(("limit", "sizes"), [(None, [1000] * 14 + [760]), (2500, [1000, 1000, 500]), (0, [])])
def test_touched_memory_is_the_one_that_is_pinned(
    tmp_path: Path, small_pieces: None, limit: int | None, sizes: list[int]
) -> None:
    """It is within the limit, CUDA is not called before ``reserve``, and no memory is touched twice."""
    made: list[RegisteredMemory] = []
    pins: list[int] = []
    touch = host_copy.touched_memory

    def noted(size: int) -> RegisteredMemory:
        made.append(memory := touch(size))
        return memory

    def pinned(memory: RegisteredMemory, device: torch.device) -> HostPiece:
        pins.append(len(memory))
        return HostPiece(torch.frombuffer(memory, dtype=torch.uint8), is_pinned=True)

    module = parts()
    before = values(module)
    memory = opened(tmp_path, module)
    with (
        patch.object(host_copy, "touched_memory", noted),
        patch.object(RegisteredMemory, "pinned", pinned),
    ):
        for _ in range(2):
            memory.prepare(limit)
        assert memory._host is not None
        wait([touched for _, touched in memory._host._touched._pieces])
        assert (sorted(map(len, made), reverse=True), pins) == (sizes, [])
        memory.reserve(limit)
        assert set(addresses(memory)) == {torch.frombuffer(one, dtype=torch.uint8).data_ptr() for one in made}
    assert (len(made), sorted(pins, reverse=True)) == (len(sizes), sizes)
    memory.sleep()
    memory.wake()
    assert_same(module, before)


def test_touched_memory_that_is_not_needed_is_released(tmp_path: Path, small_pieces: None) -> None:
    """The limit shrank because another process loaded meanwhile."""
    made: list[ReferenceType[RegisteredMemory]] = []
    touch = host_copy.touched_memory

    def noted(size: int) -> RegisteredMemory:
        memory = touch(size)
        made.append(ref(memory))
        return memory

    host = HostCopy(CPU, tmp_path)
    with patch.object(host_copy, "touched_memory", noted):
        host.prepare(10_000, pinned_bytes=5_500)
        wait([touched for _, touched in host._touched._pieces])
        host.reserve(10_000, pinned_bytes=2_000)
    assert host.pinned_bytes == 2_000
    gc.collect()
    assert sum(len(memory) for one in made if (memory := one()) is not None) == 2_000


def test_all_pages_of_touched_memory_are_there() -> None:
    touched, fresh = touched_memory(2**24), mmap.mmap(-1, 2**24)
    assert (num_resident(touched), num_resident(fresh)) == (2**24 // mmap.PAGESIZE, 0)


def num_resident(memory: mmap.mmap) -> int:
    """Return the number of pages that the kernel holds, by its own account."""
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    entries = np.fromfile(
        "/proc/self/pagemap", np.uint64, len(memory) // mmap.PAGESIZE, offset=address // mmap.PAGESIZE * 8
    )
    return int((entries >> np.uint64(63)).sum())


def test_it_has_no_effect_until_it_is_opened() -> None:
    memory, module = WeightMemory(), parts()
    before = values(module)
    with memory.region():
        memory.hold(module)
    memory.prepare()
    memory.reserve()
    assert (memory.sleep(), memory.wake(), memory.is_asleep, memory.use().weights) == (0.0, 0.0, False, 0)
    assert_same(module, before)


def test_memory_that_was_given_back_while_asleep_is_not_filled(tmp_path: Path) -> None:
    memory = HostCopy(CPU, tmp_path)
    spans = [torch.full((size,), size, dtype=torch.uint8) for size in (3, 5, 7)]
    memory.reserve(15, pinned_bytes=None)
    memory.copy(spans)
    for span_B in spans:
        span_B.zero_()
    memory.fill(spans, gone={1})
    assert [{*span_B.tolist()} for span_B in spans] == [{3}, {0}, {7}]


def test_memory_of_a_segment_that_is_no_more_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaSpans, "_library", None)
    spans = CudaSpans(torch.device("cuda", 0))
    spans._pools.add((0, 7))
    segment = {"address": 4096, "total_size": 1024, "segment_pool_id": (0, 7), "device": 0}
    others = ({"address": 8192, "segment_pool_id": (0, 0)}, {"address": 8192, "device": 1})
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [segment, *(segment | other for other in others)])
    views = [Mock(spec=Tensor, **{"data_ptr.return_value": address}) for address in (4096, 5000, 5120, 8192)]
    assert spans.gone(views) == {2, 3}


def test_adjacent_blocks_in_use_are_one_run() -> None:
    def block(address: int, size: int, state: str) -> dict[str, Any]:
        return {"address": address, "size": size, "state": state}

    blocks = [block(0, 512, "active_allocated"), block(512, 512, "active_pending_free"), block(1024, 2048, "inactive")]
    blocks.append(block(3072, 1024, "active_allocated"))
    assert [*_runs_in_use(blocks)] == [(0, 1024), (3072, 1024)]


class Cudart:
    """Registers pages like CUDA: it refuses a range that is registered already."""

    def __init__(self) -> None:
        self.known: set[int] = set()

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        if address in self.known:
            return 208
        self.known.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.known.remove(address)
        return 0


def test_pinned_pages_are_unpinned_before_they_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reuses the address, which CUDA would refuse."""
    cudart, gpu = Cudart(), torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    for _ in range(3):
        piece = pinned_memory(2**20, gpu)
        assert piece.is_pinned
        assert cudart.known == {piece.bytes_B.data_ptr()}
        part_B = piece.bytes_B[:8].fill_(1)
        del piece
        assert cudart.known == {part_B.data_ptr()}, "a view still uses it"
        assert part_B.sum() == 8
        del part_B
        assert not cudart.known


def test_an_error_of_pinning_is_not_left_for_the_next_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Mock(cudaHostRegister=Mock(return_value=1)))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(host_copy, "_forget_error", forgotten.append)
    piece = pinned_memory(2**12, torch.device("cuda", 0))
    assert not piece.is_pinned
    assert forgotten == [torch.device("cuda", 0)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_weights_on_a_gpu_come_back_after_memory_beside_them_was_freed(tmp_path: Path) -> None:
    memory = WeightMemory()
    memory.open("cuda", tmp_path)
    with memory.region():
        kept, freed = (torch.full((2**25,), value, device="cuda") for value in (1.0, 2.0))
    memory.sleep()
    memory.wake()
    del freed
    for _ in range(2):
        memory.sleep()
        memory.wake()
        assert kept.eq(1.0).all()


def test_memory_that_loading_takes_for_moments_is_not_that_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A float32 file takes its memory until it is converted; models that fit would otherwise swap for ever."""
    held = {"now": 0, "most": 0}

    def take(size: int) -> None:
        held["now"], held["most"] = size, max(size, held["most"])

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Mock(total_memory=80, uuid="gpu"))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: held["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: held["most"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: held.update(most=held["now"]))
    memory = WeightMemory()
    memory._device, memory._host = torch.device("cuda", 0), Mock(pinned_bytes=0)
    weights_B = torch.zeros(24, dtype=torch.uint8)
    memory._spans = Mock(region=nullcontext, find=lambda: [weights_B])
    with memory.region():
        take(72)
        with memory.region():
            take(24)
        take(60)
        take(24)
    assert memory.use().peak == 0
    take(35)
    take(30)
    assert memory.use().peak == 11
    with memory.region():
        take(50)
        take(30)
    assert memory.use().peak == 11, "work before a later load counts"
    assert memory.use().beside == 6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_of_a_moment_is_in_the_peak_after_it_was_given_back(tmp_path: Path) -> None:
    memory = WeightMemory()
    memory.open("cuda", tmp_path)
    with memory.region():
        kept = torch.zeros(2**25, device="cuda")
    moment = torch.zeros(2**26, device="cuda")
    del moment
    torch.cuda.empty_cache()
    use = memory.use()
    assert use.weights == kept.nbytes
    assert use.beside < 2**28 <= use.peak


@pytest.mark.gpu
def test_memory_is_pinned_again_and_again_on_a_gpu() -> None:
    device = torch.device("cuda", 0)
    for _ in range(3):
        assert pinned_memory(2**24, device).is_pinned
    piece = pinned_memory(2**12, device)
    assert torch.cuda.cudart().cudaHostRegister(piece.bytes_B.data_ptr(), 2**12, 0)  # type: ignore[no-untyped-call]
    host_copy._forget_error(device)
    assert torch.ones(2, device=device).sum() == 2
