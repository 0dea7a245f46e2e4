"""Devices of a stage, and the lock of a host's GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import ray

from deployments.settings import Settings, process_environment
from deployments.stages.stage_config import StageConfig
from engines.core.storage import HostLock

ALL_GPUS: Mapping[str, str] = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
"""A process sees all GPUs of its node, not only its own (Ray 2.60,
``NvidiaGPUAcceleratorManager.set_current_process_visible_accelerator_ids``).
"""
VISIBLE = "CUDA_VISIBLE_DEVICES"
TURNS = "turns"
"""Folder in the data directory."""


def host_lock(num_gpus: float) -> HostLock | None:
    """Return the lock of this host's GPUs; None for a process without any."""
    return HostLock(Settings().data_dir / TURNS) if num_gpus else None


def asleep_folder() -> Path:
    """Return the folder for sleeping weights beyond the host memory that may be pinned."""
    return Settings().data_dir / "asleep"


def stage_devices(stage: StageConfig) -> tuple[str, ...]:
    """Return torch's device names of a stage: its own GPU, then the node's next ones in order.

    ValueError if the node has fewer.
    """
    num_devices = stage.num_devices_used
    if not stage.num_gpus:
        return ("cpu",) * num_devices
    if num_devices == 1:
        return ("cuda",)
    import torch

    num_gpus = torch.cuda.device_count()
    if num_devices > num_gpus:
        raise ValueError(
            f"decoder.num_devices is {num_devices}, and this node has {num_gpus} GPUs: lower it, or leave it out"
        )
    own = own_gpu(ray.get_runtime_context().get_accelerator_ids()["GPU"], process_environment().get(VISIBLE))
    return tuple(f"cuda:{(own + index) % num_gpus}" for index in range(num_devices))


def own_gpu(ids: list[str], visible: str | None) -> int:
    """Return the index of this process's first own GPU. Ray's ids are entries of ``visible`` if set, else indices."""
    assert ids, "Ray gave this process no GPU"
    names = None if visible is None else visible.split(",")
    return min(int(one) if names is None else names.index(one) for one in ids)
