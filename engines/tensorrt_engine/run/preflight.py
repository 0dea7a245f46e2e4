"""Checks before the first step: the engine fits this GPU and TensorRT, and all ranks of the team have the same one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from engines.core.torch_private import nccl_communicator, process_group
from engines.tensorrt_engine.build.bindings import load_bindings
from engines.tensorrt_engine.build.engine_cache import CachedEngine
from engines.tensorrt_engine.build.targets import Target
from engines.tensorrt_engine.run.nccl import check_process, library_version


class PreflightError(RuntimeError):
    """A rank cannot take part. Says which rank, what it found and what was expected; survives pickling."""

    def __init__(self, rank: int, what: str, found: str, expected: str) -> None:
        super().__init__(rank, what, found, expected)
        self.rank, self.what, self.found, self.expected = rank, what, found, expected

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.what}: found {self.found}, expected {self.expected}"


def current_target(rank: int) -> Target:
    """Returns the GPU of this process. Raises PreflightError without one."""
    if not torch.cuda.is_available():
        raise PreflightError(rank, "a TensorRT engine runs on a GPU", "none", "one; or engine: torch")
    major, minor = torch.cuda.get_device_capability()
    return Target(major=major, minor=minor)


def check_engine_file(engine: CachedEngine, *, rank: int, target: Target) -> None:
    """Raises PreflightError for an engine of another compute capability, or of another TensorRT than is installed."""
    if engine.key.target != target.name:
        raise PreflightError(rank, f"{engine.path.name} is for another GPU", engine.key.target, target.name)
    bindings = load_bindings()
    builder, installed = f"{engine.key.product} {engine.key.version}", f"{bindings.product} {bindings.version}"
    if builder != installed:
        raise PreflightError(rank, f"{engine.path.name} is another TensorRT's", builder, installed)


def check_same_engine_file(sha256: str, *, rank: int, group: str) -> None:
    """Raises on every rank of ``group`` when one has another engine file. Collective."""
    _compare(
        {"its engine file is not that of the rest of its team": sha256[:12]}, rank=rank, group=process_group(group)
    )


def check_alike(facts: Mapping[str, str], *, rank: int) -> None:
    """Raises on every rank of the gang when one has other values. Collective."""
    assert dist.group.WORLD is not None
    named = {f"its {name} is not that of the rest of the gang": value for name, value in facts.items()}
    _compare(named, rank=rank, group=dist.group.WORLD)


def _compare(facts: Mapping[str, str], *, rank: int, group: dist.ProcessGroup) -> None:
    answers: list[Any] = [None] * group.size()
    dist.all_gather_object(answers, (rank, dict(facts)), group=group)
    (first, expected), *others = answers
    for other, values in others:
        for what, value in expected.items():
            if values.get(what) != value:
                raise PreflightError(other, what, str(values.get(what)), f"{value} (rank {first}'s)")


def check_nccl(rank: int) -> str:
    """Returns the version of the process's NCCL. PreflightError unless there is one, that TensorRT takes."""
    try:
        library = check_process()
    except RuntimeError as error:
        raise PreflightError(rank, "NCCL", str(error), "torch's alone, 2.19 or later") from None
    return ".".join(map(str, library_version(library)))


def communicator(group: str, device: torch.device) -> int:
    """Returns the address of the group's ``ncclComm_t``, after one collective on it has made it."""
    return nccl_communicator(process_group(group), device)
