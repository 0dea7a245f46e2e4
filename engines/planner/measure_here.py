"""Measure this machine from a process that is in no gang: ranks are started, measure, and end."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from engines.core.spec import ParallelSpec, tiling_sizes
from engines.parallel.communication.mesh import Groups, Teams
from engines.planner.local_ranks import local_ranks
from engines.planner.machine import Machine
from engines.planner.measure import measure
from engines.planner.profile import ModelProfile

TIMEOUT_S = 180.0
END_S = 10.0
"""How long ranks may take to end by themselves after the measurement."""


def measure_here(profile: ModelProfile, num_ranks: int, device_type: str) -> Machine:
    """Measure on ``num_ranks`` processes of this host, with one device each ("cuda") or one thread each ("cpu").

    Raises ``ValueError`` if there are not so many devices, ``RuntimeError`` if a rank fails.
    """
    if device_type == "cuda" and torch.cuda.device_count() < num_ranks:
        raise ValueError(f"{num_ranks} ranks need {num_ranks} GPUs, and this host has {torch.cuda.device_count()}")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with local_ranks(_rank, num_ranks, (profile, num_ranks, store.port, device_type)) as ranks:
        try:
            machine = Machine.from_json(ranks.answer(TIMEOUT_S))
        except TimeoutError:
            raise RuntimeError(f"measuring this machine took longer than {TIMEOUT_S:.0f} s") from None
        except RuntimeError as error:
            raise RuntimeError(f"the ranks that measure this machine ended early: {error}") from error
        with suppress(RuntimeError):  # it is measured, however they end
            ranks.leave(END_S)
        return machine


def _rank(rank: int, answer: Connection, profile: ModelProfile, num_ranks: int, port: int, device_type: str) -> None:
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device(device_type)
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, num_ranks, timeout=timedelta(seconds=TIMEOUT_S))
    if device_type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo", store=store, rank=rank, world_size=num_ranks)
    specs = [ParallelSpec(ulysses=team_size) for team_size in tiling_sizes(num_ranks)]
    teams = Teams(rank=rank, num_ranks=num_ranks, specs=specs, groups=Groups(num_ranks))
    machine = measure(profile, teams, device)
    if rank == 0:
        answer.send(machine.to_json())
    dist.barrier()
