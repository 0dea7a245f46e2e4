"""The short measurement that calibrates the cost model on the machine at hand."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from engines.core.spec import ParallelSpec
from engines.core.torch_private import int_mm, scaled_mm
from engines.parallel.attention.local import local_kernel
from engines.parallel.communication.collectives import EXCHANGES, Axis, Exchange
from engines.parallel.communication.mesh import Teams
from engines.planner.machine import Line, Machine, Rates
from engines.planner.profile import ModelProfile


def measure(profile: ModelProfile, teams: Teams, device: torch.device) -> Machine:
    """Measure this machine with a model's sizes; under a second on a GPU. Every rank of the gang makes the call.

    Ranks measure at the same time, as they work at the same time; all get rank 0's numbers, so that all choose alike.
    """
    rows = (64, 256, 1024) if device.type == "cpu" else (512, 1152, 2304, 4608)
    machine = Machine(
        name=torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads",
        products=tuple((n, _product_rate(n, profile, device)) for n in rows),
        attention=tuple((n, _attention_rate(n, profile, device)) for n in rows),
        copy_bytes_per_s=_copy_rate(device),
        memory_bytes=memory_bytes(device),
        exchanges=_exchange_lines(teams, device),
        quantised=_quantised_rates(rows, profile, device),
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
    """The products of the quantised linears by themselves; on the CPU float8 is emulated in float32."""
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
    """The product that the engine makes, with a scale a row on both sides."""
    x = torch.randn(rows, features, device=device).to(torch.float8_e4m3fn)
    weight = torch.randn(out, features, device=device).to(torch.float8_e4m3fn)
    scales = {"scale_a": torch.ones(rows, 1, device=device), "scale_b": torch.ones(1, out, device=device)}
    return lambda: scaled_mm(x, weight.t(), out_dtype=torch.bfloat16, use_fast_accum=True, **scales)


def _attention_rate(tokens: int, profile: ModelProfile, device: torch.device) -> float:
    q_BLHD = torch.randn(1, tokens, profile.num_heads, profile.head_dim, device=device).to(profile.dtype)
    kernel = local_kernel(device, profile.dtype)
    return 4.0 * tokens * q_BLHD.numel() / shortest_s(lambda: kernel(q_BLHD, q_BLHD, q_BLHD), device)


def _copy_rate(device: torch.device) -> float:
    x = torch.zeros(2**28 if device.type == "cuda" else 2**22, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    return 2 * x.nbytes / shortest_s(lambda: y.copy_(x), device)


def memory_bytes(device: torch.device) -> int:
    """What one rank has to itself."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1  # they share the host's memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // num_ranks


def _exchange_lines(teams: Teams, device: torch.device) -> dict[str, Line]:
    """Each kind at two sizes over teams of every size that the gang has (several of one size: side by side)."""
    small, large = (2**14, 2**20) if device.type == "cpu" else (2**16, 2**24)
    lines: dict[str, Line] = {}
    for team in teams.all():
        if team.spec != ParallelSpec(ulysses=len(team.ranks)) or len(team.ranks) == 1:
            continue
        for kind, exchange in EXCHANGES.items():
            points = [(float(size), _exchange_s(exchange, size, team.ulysses, device)) for size in (small, large)]
            lines[f"{kind}/{len(team.ranks)}"] = Line.through(*points)
    return lines


def _exchange_s(exchange: Exchange, size_bytes: int, axis: Axis, device: torch.device) -> float:
    x = torch.zeros(axis.size, size_bytes // axis.size // 4, device=device)
    return shortest_s(lambda: exchange(x, axis), device)


def shortest_s(call: Callable[[], object], device: torch.device, num_warm: int = 2, num_timed: int = 7) -> float:
    """Seconds of the fastest of some calls, the device's work included: what else runs here can only add to it."""
    times = []
    for number in range(num_warm + num_timed):
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number >= num_warm:
            times.append(time.perf_counter() - started)
    return max(min(times), 1e-9)
