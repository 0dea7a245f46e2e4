"""Ranks that read a checkpoint together get the same bits as one rank, and each reads only its share."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Condition
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, multiprocessing, nn

from engines.core import logs
from engines.core.engine import RankContext
from engines.gang.communicator import Communicator
from engines.parallel import file_reading
from engines.parallel.collectives import Axis, all_gather
from engines.parallel.early_start import host_axis, start_early, wait_for_early_start
from engines.parallel.file_reading import Span, SpanReader
from engines.parallel.weight_files import files_of
from pipelines.checkpoint import Checkpoint
from pipelines.gpu_weights import fill
from pipelines.lora.source import LoraSource
from tests.engines.support.gloo import gang
from tests.pipelines.lora.support.tiny_lora import write_lora
from tests.pipelines.support.checkpoints import tiny, tiny_models, tiny_qwen
from tests.pipelines.support.checkpoints.damage import changed, scaled
from tests.pipelines.test_sliced import in_many_files
from tests.support.patience import PATIENCE_S

CPU = torch.device("cpu")
BUCKET_BYTES, PIECE_BYTES = 20_000, 3_000
"""Small sizes: buckets and pieces end inside tensors, and tensors end inside buckets."""
ADAPTER = "pytorch_lora_weights.safetensors"
SIZES = [2, pytest.param(4, marks=pytest.mark.slow)]


class Values(nn.Module):
    """Tensors of several dtypes, shapes and sizes; none of them is a multiple of the buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(70, 331))
        self.narrow = nn.Parameter(torch.randn(513).bfloat16())
        self.sixteen = nn.Parameter(torch.randn(3, 5).half())
        self.none = nn.Parameter(torch.empty(0, 4))
        self.one = nn.Parameter(torch.tensor(3.5))
        self.register_buffer("whole", torch.arange(1000))
        self.register_buffer("yes", torch.tensor([True, False, True]))


def files_of_values(folder: Path) -> tuple[Path, ...]:
    """Write tensors into three files, of which the last is smaller than the number of ranks."""
    torch.manual_seed(0)
    tensors = {name: x.detach().contiguous() for name, x in Values().state_dict().items()}
    parts = [("wide", "one"), ("narrow", "sixteen", "none", "whole"), ("yes",)]
    for number, names in enumerate(parts):
        save_file({name: tensors[name] for name in names}, folder / f"{number}.safetensors")
    return tuple(folder / f"{number}.safetensors" for number in range(len(parts)))


def everyone() -> Axis:
    return host_axis(RankContext(rank=dist.get_rank(), num_ranks=dist.get_world_size(), device="cpu"))


@contextmanager
def small_buckets() -> Iterator[list[SpanReader]]:
    """Make buckets and pieces small. Yields the created readers."""
    readers: list[SpanReader] = []

    def made(reader: SpanReader, *args: Any) -> None:
        init(reader, *args)
        readers.append(reader)

    init = SpanReader.__init__
    with ExitStack() as stack:
        stack.enter_context(patch.object(file_reading, "BUCKET_BYTES", BUCKET_BYTES))
        stack.enter_context(patch.object(file_reading, "PIECE_BYTES", PIECE_BYTES))
        stack.enter_context(patch.object(SpanReader, "__init__", made))
        yield readers


def as_bytes(tensors: dict[str, Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    return {
        name: (x.dtype, tuple(x.shape), x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        for name, x in tensors.items()
    }


def fill_together(files: Sequence[Path]) -> tuple[Any, int, int, int]:
    """Return the tensors' bytes, the numbers read and received here, and the most of one exchange."""
    largest = []

    def gather(x: Tensor, axis: Axis) -> Tensor:
        gathered = all_gather(x, axis)
        largest.append(gathered.nbytes)
        return gathered

    with torch.device("meta"):
        module = Values()
    with small_buckets() as readers, patch.object(file_reading, "all_gather", gather):
        fill(module, files, CPU, axis=everyone())
    (reader,) = readers
    return as_bytes(module.state_dict()), reader.read_bytes, reader.exchanged_bytes, max(largest)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_tensors_of_several_files_and_dtypes_are_read_once(num_ranks: int, tmp_path: Path) -> None:
    files = files_of_values(tmp_path)
    expected: dict[str, Tensor] = {}
    for file in files:
        expected |= load_file(file)
    total = sum(x.nbytes for x in expected.values())
    answers = gang(num_ranks).run(fill_together, files)
    for values, read_bytes, exchanged_bytes, largest in answers:
        assert values == as_bytes(expected)
        assert read_bytes + exchanged_bytes == total
        assert BUCKET_BYTES <= largest < BUCKET_BYTES + num_ranks
    read = [read_bytes for _, read_bytes, *_ in answers]
    assert sum(read) == total, "each byte is read by one rank"
    assert max(read) - min(read) < 0.01 * total, "in equal shares"


def reads_at_exchanges(file: Path) -> list[tuple[int, bool]]:
    """Return the bytes read at each exchange, and whether the next share was read before it.

    Each exchange waits for the next share.
    """
    total, own = file.stat().st_size, BUCKET_BYTES // 2
    changed, read_bytes, found = Condition(), 0, list[tuple[int, bool]]()

    def count(view: memoryview, piece: Span) -> None:
        nonlocal read_bytes
        read_into(view, piece)
        with changed:
            read_bytes += piece.num_bytes
            changed.notify_all()

    def gather(x: Tensor, axis: Axis) -> Tensor:
        next_bytes = min(own * (len(found) + 2), total // 2)
        with changed:
            was_read = all(is_read for _, is_read in found)  # after the first failure, no further waits
            is_read = was_read and changed.wait_for(lambda: read_bytes >= next_bytes, PATIENCE_S / 2)
            found.append((read_bytes, is_read))
        return all_gather(x, axis)

    read_into = file_reading._read_into
    target_B = torch.empty(total, dtype=torch.uint8)
    with ExitStack() as stack:
        stack.enter_context(small_buckets())
        stack.enter_context(patch.object(file_reading, "_read_into", count))
        stack.enter_context(patch.object(file_reading, "all_gather", gather))
        opened = stack.enter_context(file.open("rb"))
        reader = stack.enter_context(SpanReader(CPU, everyone()))
        reader.read([Span(file=opened.fileno(), offset=0, target_B=target_B)])
    assert target_B.numpy().tobytes() == file.read_bytes()
    return found


def test_the_next_shares_are_read_while_one_is_exchanged(tmp_path: Path) -> None:
    """Shares are read ahead within the memory limit."""
    num_buckets, own = 7, BUCKET_BYTES // 2
    (tmp_path / "weights").write_bytes(random.Random(0).randbytes(num_buckets * BUCKET_BYTES))
    for found in gang(2).run(reads_at_exchanges, tmp_path / "weights"):
        assert [is_read for _, is_read in found] == [True] * num_buckets
        for number, (read_bytes, _) in enumerate(found):
            assert read_bytes <= own * (number + file_reading.NUM_SHARES)


@pytest.mark.parametrize("begin", [0, 3, 12, 15, 24])
def test_a_share_is_one_span_wherever_its_bytes_follow_each_other_in_a_file(begin: int, tmp_path: Path) -> None:
    """Each piece costs Python's lock, which all threads need. Tensors 1 and 2 follow each other; 3 is after a gap."""
    contents = bytes(range(100)), bytes(range(100, 200))
    for number, content in enumerate(contents):
        (tmp_path / str(number)).write_bytes(content)
    places = [(0, 5, 10), (0, 15, 4), (0, 23, 8), (1, 31, 6)]
    with (tmp_path / "0").open("rb") as first, (tmp_path / "1").open("rb") as second:
        files = first.fileno(), second.fileno()
        bucket = [
            Span(file=files[file], offset=offset, target_B=torch.empty(size, dtype=torch.uint8))
            for file, offset, size in places
        ]
        own_B = torch.full((7,), 255, dtype=torch.uint8)
        spans = list(file_reading.share_of(bucket, begin, own_B))
        for span in spans:
            file_reading._read_into(span.target_B.numpy().data, span)
    whole = [(file, byte) for file, offset, size in places for byte in contents[file][offset : offset + size]]
    own = whole[begin : begin + len(own_B)]
    assert own_B.tolist() == [byte for _, byte in own] + [255] * (len(own_B) - len(own))
    jumps = [pair for pair in itertools.pairwise(own) if pair[1] != (pair[0][0], pair[0][1] + 1)]
    assert len(spans) == 1 + len(jumps)


def open_checkpoint(folder: Path, how: dict[str, Any]) -> Checkpoint:
    """Return the checkpoint with its adapter, which is merged, if it has one."""
    adapter = folder / ADAPTER
    loras = [LoraSource(path=str(adapter))] if adapter.is_file() else []
    return Checkpoint(folder, CPU, how.get("dtype", "auto"), loras)


class Lines(logging.Handler):
    """Handler that keeps log records."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record)


def denoiser_bytes(folder: Path, how: dict[str, Any]) -> tuple[Any, int, list[str]]:
    """Return the transformers' bytes by name, those that this rank read, and the phases in its log."""
    handler = Lines()
    previous = logs.logger.level
    logs.logger.setLevel(logging.INFO)
    logs.logger.addHandler(handler)
    try:
        with small_buckets() as readers:
            checkpoint = open_checkpoint(folder, how)
            model = checkpoint.denoiser(quantised=how.get("quantised", False), axis=everyone())
    finally:
        logs.logger.removeHandler(handler)
        logs.logger.setLevel(previous)
    named = {f"{part}.{name}": x for part, one in model.modules.items() for name, x in one.state_dict().items()}
    told = [line.__dict__ for line in handler.lines if line.getMessage() == logs.MESSAGE]
    phases = [line["phase"] for line in told if line.get("num_bytes")]
    return as_bytes(named), sum(reader.read_bytes for reader in readers), phases


def expected_bytes(folder: Path, how: dict[str, Any]) -> Any:
    model = open_checkpoint(folder, how).denoiser()
    return as_bytes(
        {f"{part}.{name}": x for part, one in model.modules.items() for name, x in one.state_dict().items()}
    )


def in_fp8(path: Path) -> Path:
    return changed(
        tiny_models.z_image(path / "base"), "transformer", path / "fp8", partial(scaled, ending=".weight_scale")
    )


def with_an_adapter(path: Path) -> Path:
    folder = in_many_files(tiny.flux(path))
    write_lora(folder, folder / ADAPTER, seed=3)
    return folder


MAKERS: dict[str, tuple[Callable[[Path], Path], dict[str, Any]]] = {
    "float32": (lambda path: in_many_files(tiny.flux(path)), {}),
    "cast": (lambda path: in_many_files(tiny.flux(path)), {"dtype": torch.bfloat16}),
    "parts in float32": (partial(tiny.wan, expand_timesteps=True), {"dtype": torch.bfloat16}),
    "two transformers": (partial(tiny.wan, boundary_ratio=0.9), {}),
    "control network": (tiny_qwen.qwen_controlled, {}),
    "adapter": (with_an_adapter, {"dtype": torch.bfloat16}),
    "scaled fp8": (in_fp8, {"dtype": torch.bfloat16}),
    "to be quantised": (lambda path: in_many_files(tiny.flux(path)), {"quantised": True}),
}


@pytest.mark.parametrize("num_ranks", SIZES)
@pytest.mark.parametrize("name", MAKERS)
def test_transformers_have_the_bits_of_plain_reading(name: str, num_ranks: int, tmp_path: Path) -> None:
    make, how = MAKERS[name]
    folder = make(tmp_path)
    expected = expected_bytes(folder, how)
    answers = gang(num_ranks).run(denoiser_bytes, folder, how)
    parts = {path.parent for path in folder.glob("*/*.safetensors")} & {
        folder / part for part in ("transformer", "transformer_2", "controlnet")
    }
    file_bytes = sum(x.nbytes for part in parts for file in files_of(part) for x in load_file(file).values())
    for values, _, phases in answers:
        assert values == expected
        assert set(phases) == {"load: files", "load: exchange"}
    read_bytes = sum(read for _, read, _ in answers)
    if name == "to be quantised":
        assert 0 < read_bytes < 0.5 * file_bytes, "the large weights stay in the mapped file"
    else:
        assert read_bytes == file_bytes, "each byte is read by one rank"


def read_damaged(file: Path) -> str:
    """Return the error of a file that is cut short, which all ranks find before they exchange."""
    with torch.device("meta"):
        module = Values()
    with pytest.raises(ValueError, match="ends 1 bytes before its last tensor does") as caught:
        fill(module, [file], CPU, axis=everyone())
    dist.barrier()  # no rank is left in an exchange
    return str(caught.value)


def test_a_file_that_is_cut_short_is_an_error_on_all_ranks_alike(tmp_path: Path) -> None:
    """Only the last rank would read its end."""
    whole, *_ = files_of_values(tmp_path)
    (tmp_path / "cut.safetensors").write_bytes(whole.read_bytes()[:-1])
    assert len(set(gang(2).run(read_damaged, tmp_path / "cut.safetensors"))) == 1


def hosts() -> tuple[tuple[int, ...], int, list[int]]:
    """Return this rank's axis in a gang of four on two hosts, and the result of an exchange on it."""
    axis = host_axis(RankContext(rank=dist.get_rank(), num_ranks=4, device="cpu", num_hosts=2))
    return axis.ranks, axis.index, all_gather(torch.tensor([dist.get_rank()]), axis).flatten().tolist()


def test_ranks_of_one_host_read_together() -> None:
    assert gang(4).run(hosts) == [
        ((0, 1), 0, [0, 1]),
        ((0, 1), 1, [0, 1]),
        ((2, 3), 0, [2, 3]),
        ((2, 3), 1, [2, 3]),
    ]


def member(rank: int, pipe: Connection, files: Sequence[Path]) -> None:
    """Run a rank on a GPU from the communicator on, with its early start beside the weights."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    communicator = Communicator(rank=rank, num_ranks=2, device=device, timeout_s=60.0)
    if rank == 0:
        address = communicator.open_store("127.0.0.1")
        pipe.send(address)
    else:
        address = pipe.recv()
    communicator.join(address)
    start_early(device)
    axis = host_axis(RankContext(rank=rank, num_ranks=2, device=str(device)))
    expected: dict[str, Tensor] = {}
    for file in files:
        expected |= load_file(file)
    for bucket_bytes in (file_reading.BUCKET_BYTES, BUCKET_BYTES):
        with torch.device("meta"):
            module = Values()
        with patch.object(file_reading, "BUCKET_BYTES", bucket_bytes):
            fill(module, files, device, axis=axis)
        assert as_bytes(module.state_dict()) == as_bytes(expected)
        assert all(x.device == device for x in module.state_dict().values())
    wait_for_early_start()
    communicator.leave()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_read_together(tmp_path: Path) -> None:
    files = files_of_values(tmp_path)
    context = multiprocessing.get_context("spawn")
    pipes = context.Pipe()
    members = [context.Process(target=member, args=(rank, pipes[rank], files)) for rank in range(2)]
    for process in members:
        process.start()
    for process in members:
        process.join(120)
    assert [process.exitcode for process in members] == [0, 0]
