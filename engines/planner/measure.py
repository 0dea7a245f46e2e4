"""The short measurement that calibrates the cost model on this machine."""

from __future__ import annotations

import multiprocessing as mp
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import ProcessContext, ProcessException, start_processes

from engines.core.spec import ParallelSpec, tiling_sizes
from engines.core.torch_private import int_mm, scaled_mm
from engines.parallel.collectives import EXCHANGES, Axis, Exchange, all_gather
from engines.parallel.local_attention import local_kernel
from engines.parallel.mesh import Groups, Teams
from engines.planner.machine import Line, Machine, Rates
from engines.planner.profile import ModelProfile

NUM_WARM, NUM_TIMED = 2, 7
"""Calls before those that are timed, and calls that are."""

SIZES = {"cpu": (2**14, 2**20), "cuda": (2**16, 2**24, 2**27)}
"""Bytes of exchanges that are measured, the last one unless an earlier one is slow. A call from Python takes up to
150 us on some hosts, behind which NVLink hides a transfer of 16 MiB."""
SLOW_EXCHANGE_S = 0.02
"""An exchange that takes longer, as over a network, is measured with no larger size: the start would wait for it."""


def measure(profile: ModelProfile, teams: Teams, device: torch.device, attention: str = "auto") -> Machine:
    """Measure this machine with a model's sizes, in under a second on a GPU. Every rank of the gang makes the call.

    Ranks measure at the same time, as they work at the same time. All get rank 0's figures, so all choose alike.
    ``attention`` is the precision of the attention that is timed.
    """
    rows = (64, 256, 1024) if device.type == "cpu" else (512, 1152, 2304, 4608)
    machine = Machine(
        name=torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads",
        products=tuple((n, _product_rate(n, profile, device)) for n in rows),
        attention=tuple((n, _attention_rate(n, profile, device, attention)) for n in rows),
        copy_bytes_per_s=_copy_rate(device),
        memory_bytes=smallest_memory_bytes(device),
        exchanges=_exchange_lines(teams, device),
        quantised=_quantised_rates(rows, profile, device),
        attention_precision=attention,
        fast_path=device.type == "cuda",
    )
    shared = [machine]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(shared, src=0, device=device)
    return shared[0]


def _product_rate(rows: int, profile: ModelProfile, device: torch.device) -> float:
    x = torch.randn(rows, profile.hidden, device=device).to(profile.dtype)
    weight = torch.randn(4 * profile.hidden, profile.hidden, device=device).to(profile.dtype)
    return 2.0 * x.numel() * weight.shape[0] / shortest_s(lambda: torch.nn.functional.linear(x, weight), device)


def _quantised_rates(rows: tuple[int, ...], profile: ModelProfile, device: torch.device) -> dict[str, Rates]:
    """Measure the products of the quantised linears alone; on the CPU float8 is emulated in float32."""
    features, out = profile.hidden, 4 * profile.hidden
    if features % 16:
        return {}
    makers: dict[str, Callable[[int], Callable[[], object]]] = {
        "int8": lambda n: _int8_product(n, features, out, device)
    }
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        makers["fp8"] = lambda n: _fp8_product(n, features, out, device)
    rates = {
        name: tuple((n, 2.0 * n * features * out / shortest_s(make(n), device)) for n in rows)
        for name, make in makers.items()
    }
    if device.type == "cpu":
        rates["fp8"] = tuple((n, _product_rate(n, profile, device)) for n in rows)
    return rates


def _int8_product(rows: int, features: int, out: int, device: torch.device) -> Callable[[], object]:
    x = torch.ones(rows, features, dtype=torch.int8, device=device)
    weight = torch.ones(out, features, dtype=torch.int8, device=device)
    return lambda: int_mm(x, weight.t())


def _fp8_product(rows: int, features: int, out: int, device: torch.device) -> Callable[[], object]:
    """Return the engine's product, with a scale per row on both sides."""
    x = torch.randn(rows, features, device=device).to(torch.float8_e4m3fn)
    weight = torch.randn(out, features, device=device).to(torch.float8_e4m3fn)
    scales = {"scale_a": torch.ones(rows, 1, device=device), "scale_b": torch.ones(1, out, device=device)}
    return lambda: scaled_mm(x, weight.t(), out_dtype=torch.bfloat16, use_fast_accum=True, **scales)


def _attention_rate(tokens: int, profile: ModelProfile, device: torch.device, attention: str) -> float:
    q_BLHD = torch.randn(1, tokens, profile.num_heads, profile.head_dim, device=device).to(profile.dtype)
    kernel = local_kernel(device, profile.dtype, attention)
    return 4.0 * tokens * q_BLHD.numel() / shortest_s(lambda: kernel(q_BLHD, q_BLHD, q_BLHD), device)


def _copy_rate(device: torch.device) -> float:
    x = torch.zeros(2**28 if device.type == "cuda" else 2**22, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    return 2 * x.nbytes / shortest_s(lambda: y.copy_(x), device)


def memory_bytes(device: torch.device) -> int:
    """Return the memory of one rank."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1  # ranks share the host's memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // num_ranks


def smallest_memory_bytes(device: torch.device) -> int:
    """Return the memory of the rank that has least. Every rank of the gang makes the call: GPUs may be unlike."""
    own = torch.tensor(memory_bytes(device), device=device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(own, dist.ReduceOp.MIN)
    return int(own)


def _exchange_lines(teams: Teams, device: torch.device) -> dict[str, Line]:
    """Measure each kind at two sizes, over teams of every size of the gang. Teams of one size measure side by side."""
    small, *larger = SIZES["cpu" if device.type == "cpu" else "cuda"]
    lines: dict[str, Line] = {}
    for team in teams.all():
        if team.spec != ParallelSpec(ulysses=len(team.ranks)) or len(team.ranks) == 1:
            continue
        for kind, exchange in EXCHANGES.items():
            first = float(small), _exchange_s(exchange, small, team.ulysses, device)
            for size in larger:
                last = float(size), _exchange_s(exchange, size, team.ulysses, device)
                if _slowest_s(last[1], team.ulysses, device) > SLOW_EXCHANGE_S:
                    break
            lines[f"{kind}/{len(team.ranks)}"] = Line.through(first, last)
    return lines


def _slowest_s(own_s: float, axis: Axis, device: torch.device) -> float:
    """Return the seconds of the slowest rank, on all ranks."""
    return float(all_gather(torch.tensor([own_s], device=device), axis).max())


def _exchange_s(exchange: Exchange, size_bytes: int, axis: Axis, device: torch.device) -> float:
    x = torch.zeros(axis.size, size_bytes // axis.size // 4, device=device)
    return shortest_s(lambda: exchange(x, axis), device)


def shortest_s(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest of some calls, including the device's work. Other load can only add time."""
    times = []
    for number in range(NUM_WARM + NUM_TIMED):
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number >= NUM_WARM:
            times.append(time.perf_counter() - started)
    return max(min(times), 1e-9)


Body = Callable[..., None]
"""Called in each rank's process: ``(rank, connection, *args)``. Rank 0 sends its answer through the connection."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalRanks:
    """Running ranks on this host."""

    context: ProcessContext
    """Watches their processes."""
    receiver: Connection
    """Gets rank 0's answer."""

    def answer(self, within_s: float) -> Any:
        """Return rank 0's answer.

        Raise RuntimeError as soon as a rank fails, with the last line of its error, or if all end without an answer.
        Raise TimeoutError after ``within_s``.
        """
        end_s = time.monotonic() + within_s
        while True:
            ready = wait([self.receiver, *self.context.sentinels], max(0.0, end_s - time.monotonic()))
            if self.receiver in ready:
                return self.receiver.recv()
            if not ready:
                raise TimeoutError(f"no answer from {len(self.context.processes)} ranks in {within_s:.0f} s")
            if self._join(0):
                raise RuntimeError(f"all {len(self.context.processes)} ranks ended without an answer")

    def leave(self, within_s: float) -> None:
        """Wait until all ranks have ended, at most ``within_s``. RuntimeError if one fails meanwhile."""
        end_s = time.monotonic() + within_s
        while not self._join(max(0.0, end_s - time.monotonic())) and time.monotonic() < end_s:
            pass

    def _join(self, timeout_s: float) -> bool:
        """Wait until one more rank ends, at most ``timeout_s``; return whether all have ended."""
        try:
            return bool(self.context.join(timeout=timeout_s))
        except ProcessException as error:
            raise RuntimeError(str(error).strip().splitlines()[-1]) from error


@contextmanager
def local_ranks(body: Body, num_ranks: int, args: tuple[Any, ...] = ()) -> Iterator[LocalRanks]:
    """Run ``body`` in ranks of their own processes (spawned, so it must be picklable). All end with the block."""
    receiver, sender = mp.get_context("spawn").Pipe(duplex=False)
    start: Any = start_processes
    context = start(body, args=(sender, *args), nprocs=num_ranks, join=False)
    try:
        yield LocalRanks(context=context, receiver=receiver)
    finally:
        for process in context.processes:
            process.kill()
            process.join()


TIMEOUT_S = 180.0
END_S = 10.0
"""Time for ranks to exit by themselves after the measurement."""


def measure_here(profile: ModelProfile, num_ranks: int, device_type: str, attention: str = "auto") -> Machine:
    """Measure on ``num_ranks`` processes of this host, with one device each ("cuda") or one thread each ("cpu").

    Raise ``ValueError`` if there are too few devices, ``RuntimeError`` if a rank fails.
    """
    if device_type == "cuda" and torch.cuda.device_count() < num_ranks:
        raise ValueError(f"{num_ranks} ranks need {num_ranks} GPUs, and this host has {torch.cuda.device_count()}")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with local_ranks(_rank, num_ranks, (profile, num_ranks, store.port, device_type, attention)) as ranks:
        try:
            machine = Machine.from_json(ranks.answer(TIMEOUT_S))
        except TimeoutError:
            raise RuntimeError(f"measuring this machine took longer than {TIMEOUT_S:.0f} s") from None
        except RuntimeError as error:
            raise RuntimeError(f"the ranks that measure this machine ended early: {error}") from error
        with suppress(RuntimeError):  # the measurement is complete, however they end
            ranks.leave(END_S)
        return machine


def _rank(
    rank: int, answer: Connection, profile: ModelProfile, num_ranks: int, port: int, device_type: str, attention: str
) -> None:
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device(device_type)
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, num_ranks, timeout=timedelta(seconds=TIMEOUT_S))
    if device_type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo", store=store, rank=rank, world_size=num_ranks)
    specs = [ParallelSpec(ulysses=team_size) for team_size in tiling_sizes(num_ranks)]
    teams = Teams(rank=rank, num_ranks=num_ranks, specs=specs, groups=Groups(num_ranks))
    machine = measure(profile, teams, device, attention)
    if rank == 0:
        answer.send(machine.to_json())
    dist.barrier()
