"""Checks before the first step: the plan fits this GPU and TensorRT, and every rank of the team has the same one."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from engines.tensorrt_engine.bindings import load_bindings
from engines.tensorrt_engine.nccl import check_process
from engines.tensorrt_engine.plan_cache import CachedPlan
from engines.tensorrt_engine.targets import Target


class PreflightError(RuntimeError):
    """A rank cannot take part. Says which rank, what it found and what was expected; survives pickling."""

    def __init__(self, rank: int, what: str, found: str, expected: str) -> None:
        super().__init__(rank, what, found, expected)
        self.rank, self.what, self.found, self.expected = rank, what, found, expected

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.what}: found {self.found}, expected {self.expected}"


def current_target(rank: int) -> Target:
    """The GPU of this process. Raises PreflightError without one."""
    if not torch.cuda.is_available():
        raise PreflightError(rank, "a TensorRT engine runs on a GPU", "none", "one; or engine: torch")
    major, minor = torch.cuda.get_device_capability()
    return Target(major=major, minor=minor)


def check_plan(plan: CachedPlan, *, rank: int, target: Target) -> None:
    """The plan is of this GPU's compute capability and of the installed TensorRT."""
    if plan.key.target != target.name:
        raise PreflightError(rank, f"plan {plan.path.name} is for another GPU", plan.key.target, target.name)
    bindings = load_bindings()
    of_plan, installed = f"{plan.key.product} {plan.key.version}", f"{bindings.product} {bindings.version}"
    if of_plan != installed:
        raise PreflightError(rank, f"plan {plan.path.name} is another TensorRT's", of_plan, installed)


def check_same_plan(sha256: str, *, rank: int, group: str) -> None:
    """Every rank of ``group`` has this very plan. Collective; raises on every rank when one differs."""
    members = resolve_group(group)
    digests: list[Any] = [None] * members.size()
    dist.all_gather_object(digests, (rank, sha256), group=members)
    (first, expected), *others = digests
    for other, digest in others:
        if digest != expected:
            raise PreflightError(
                other, "it has another plan than the rest of its team", digest[:12], f"{expected[:12]} (rank {first}'s)"
            )


def check_nccl(rank: int) -> None:
    """One NCCL in the process, of a version that TensorRT takes."""
    try:
        check_process()
    except RuntimeError as error:
        raise PreflightError(rank, "NCCL", str(error), "torch's alone, 2.19 or later") from None


def communicator(group: str, device: torch.device) -> int:
    """The address of the group's ``ncclComm_t``, after one collective on it has made it."""
    backend: Any = resolve_group(group)._get_backend(device)
    return int(backend._comm_ptr())


def resolve_group(name: str) -> dist.ProcessGroup:
    resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    group: dist.ProcessGroup = resolve(name)
    return group
