"""Processes that stand by for the ranks of gangs: started, with all that a rank imports, and nothing else.

To start and to import is most of what it takes a small gang to come up, and seconds of every gang. So each node keeps a
few processes that have done it, for whichever gang there starts next. They are in no placement group and have no GPU:
Ray's node manager holds them among its idle workers, and gives one to an actor that is to start with the same
environment variables. Where there is none, a process is started as ever.

Ray 2.60 has the call for that (``PrestartWorkers``) but no function for it, and takes a hook for what a worker does
first (``worker_process_setup_hook``) in the environment of a whole job alone, of which this is the variable.
"""

from __future__ import annotations

import asyncio
import fcntl
import importlib
import json
import logging
import os
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from threading import Thread
from typing import Any

import grpc
import psutil
import ray
from ray._private import ray_constants
from ray._private.grpc_utils import init_grpc_channel
from ray.core.generated import common_pb2, node_manager_pb2, node_manager_pb2_grpc

from pipelines.libraries import quick_imports

ROOT = Path(__file__).parents[3]
HOOK = ray_constants.WORKER_PROCESS_SETUP_HOOK_ENV_VAR
CONNECTING = (
    "torch",
    "engines.gang.ranks.communicator",
    "engines.gang.ranks.rank",
    "engines.parallel.communication.early_start",
    "deployments.stages.gang.rank",
)
"""What ranks import before they load anything."""
LOADING = (
    "engines.gang.jobs.rank_jobs",
    "engines.registry",
    "engines.torch_engine.load",
    "engines.warm_up",
    "pipelines.blocks.blank",
    "pipelines.blocks.denoiser",
    "pipelines.blocks.opened",
    "pipelines.blocks.sampler",
    "diffusers.pipelines.auto_pipeline",
)
"""What they import then, whatever their model."""
NO_DEVICE_YET = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Whether there is a GPU can be asked in two ways; the other one fixes for a process which GPUs it sees."""
QUIET_S, LATEST_S = 5.0, 60.0
"""First come the jobs that wait, after a start or since a gang was lost: spares are ordered once there was none for so
long, or at the latest after a minute."""
LOOK_EVERY_S = 1.0
EVERY_S = 30.0
KEPT_S = 3600
"""So long a spare is kept at least, in case nobody looks any more."""
ORDER_DEADLINE_S = 10.0
SEEN_WITHIN_S, SEEN_POLL_S = 30.0, 0.2
"""Until a process that was ordered is there to be counted."""

logger = logging.getLogger(__name__)


def spare_environment(variables: Mapping[str, str]) -> Mapping[str, str]:
    """Returns variables to start ranks with, in a process whose own are ``variables``, so that spares can be ranks.

    A spare imports this project before it hears of an application, and with it of where the project lies.
    """
    path = os.pathsep.join(filter(None, (str(ROOT), variables.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, HOOK: f"{__name__}.{prepare.__name__}", **NO_DEVICE_YET}


def prepare() -> None:
    """Imports what a rank will, the larger part in a thread, beside which a rank that is there already connects."""
    _import(CONNECTING)
    _PREPARATION.append(Thread(target=_import_quickly, args=(LOADING,), name="libraries", daemon=True))
    _PREPARATION[-1].start()


def wait_until_prepared() -> None:
    """Returns once that thread is done, at once where there is none.

    Modules that import each other must not be imported by two threads: each would see the other's half of them.
    """
    for thread in _PREPARATION:
        thread.join()
        _assert_sees_its_own()


def _assert_sees_its_own() -> None:
    """What asks for a GPU in a process that stands by, before Ray gave it one, has it see all GPUs from then on."""
    import torch

    if own := ray.get_runtime_context().get_accelerator_ids()["GPU"]:
        num_seen = torch._C._cuda_getDeviceCount()
        assert num_seen == len(own), (
            f"this process sees {num_seen} GPUs, and has {own}: something that it imported asked for GPUs too early; "
            "denoiser.num_spares: 0 does without processes that stand by"
        )


_PREPARATION: list[Thread] = []


def _import(names: Iterable[str]) -> None:
    """What cannot be imported is told here, and told again by the rank that cannot do without."""
    try:
        for name in names:
            importlib.import_module(name)
    except Exception:
        traceback.print_exc()


def _import_quickly(names: Iterable[str]) -> None:
    with quick_imports():
        _import(names)


async def keep_spares(wanted: Mapping[str, int], is_idle: Callable[[], bool]) -> None:
    """Sees to it for ever that this node has so many spares for actors of each runtime environment, as Ray writes it.

    One without variables is for a replica: it has imported nothing but Ray. ``is_idle`` says whether nothing else is to
    be done just now.
    """
    quiet_s = waited_s = 0.0
    while quiet_s < QUIET_S and waited_s < LATEST_S:
        await asyncio.sleep(LOOK_EVERY_S)
        quiet_s, waited_s = (quiet_s + LOOK_EVERY_S if is_idle() else 0.0), waited_s + LOOK_EVERY_S
    while True:
        try:
            await asyncio.to_thread(_top_up, wanted)
        except (grpc.RpcError, psutil.Error, OSError) as error:
            logger.warning("spare processes cannot be ordered: %r", error)
        await asyncio.sleep(EVERY_S)


def _top_up(wanted: Mapping[str, int]) -> None:
    raylet = psutil.Process().parent()
    assert raylet is not None
    node: Any = ray._private.worker.global_worker.node
    with (Path(node.get_session_dir_path()) / f"spares_{raylet.pid}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # gangs that look at the same time would each order all that are missing
        orders = _missing(wanted, raylet)
        for runtime_env, num in orders.items():
            _order(num, runtime_env)
        if orders:
            logger.info("spare processes are ordered", extra={"num_spares": sum(orders.values())})
        end_s = time.monotonic() + SEEN_WITHIN_S
        while orders and _missing(wanted, raylet) and time.monotonic() < end_s:
            time.sleep(SEEN_POLL_S)


def _missing(wanted: Mapping[str, int], raylet: psutil.Process) -> dict[str, int]:
    missing = {env: num - len(spares_of(raylet, env)) for env, num in wanted.items()}
    return {env: num for env, num in missing.items() if num > 0}


def spares_of(raylet: psutil.Process, runtime_env: str) -> list[psutil.Process]:
    """Returns the children of a node manager that stand by for actors with ``runtime_env``, or are about to."""
    variables = json.loads(runtime_env).get("env_vars", {})
    return [process for process in raylet.children() if _stands_by(process, variables)]


def _stands_by(process: psutil.Process, variables: Mapping[str, str]) -> bool:
    try:
        known = process.as_dict(["cmdline", "environ"])
    except psutil.Error:  # it has just ended
        return False
    command, own = known["cmdline"] or [""], known["environ"] or {}
    is_idle = command[0] == "ray::IDLE" or any(part.endswith("default_worker.py") for part in command)
    return is_idle and own.get(HOOK) == variables.get(HOOK) and variables.items() <= own.items()


def _order(num: int, runtime_env: str) -> None:
    node: Any = ray._private.worker.global_worker.node
    # Generated modules have no types.
    common: Any = common_pb2
    messages: Any = node_manager_pb2
    services: Any = node_manager_pb2_grpc
    request = messages.PrestartWorkersRequest(language=common.PYTHON, num_workers=num, keep_alive_duration_secs=KEPT_S)
    request.runtime_env_info.serialized_runtime_env = runtime_env
    with init_grpc_channel(f"{node.node_ip_address}:{node.node_manager_port}") as channel:
        services.NodeManagerServiceStub(channel).PrestartWorkers(request, timeout=ORDER_DEADLINE_S)
