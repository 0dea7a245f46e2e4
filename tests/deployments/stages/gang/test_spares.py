"""Processes that stand by: what they have imported, who orders them, and who gets them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import psutil
import ray

from deployments.stages.gang import spares
from deployments.stages.gang.spares import HOOK, spare_environment, spares_of
from engines.gang.ranks.rank import own_runtime_env
from tests.deployments.support.live import wait_until
from tests.deployments.support.spares import is_idle
from tests.support.fenced import ROOT
from tests.support.patience import PATIENCE_S

PROGRAM = """
import json, sys, torch

asked = []
for name in ("is_available", "device_count", "_lazy_init", "is_bf16_supported", "get_device_capability"):
    answer = getattr(torch.cuda, name)
    setattr(torch.cuda, name, lambda *a, name=name, answer=answer: asked.append(name) or answer(*a))

from deployments.stages.gang.spares import prepare, wait_until_prepared
prepare()
connecting = [name for name in ("torch", "deployments.stages.gang.rank") if name in sys.modules]
wait_until_prepared()
asked_by_imports, imported = list(asked), set(sys.modules)

from deployments.config import ModelConfig
from deployments.stages.gang.rank import LoadRankParts
from engines.core.rank import RankContext

alone = {"engine": "torch", "strategy": "ulysses", "num_ranks": 1}
LoadRankParts(model=ModelConfig(name="flux-shapes", denoiser=alone))(RankContext(rank=0, num_ranks=1, device="cpu"))()
later = [name for name in set(sys.modules) - imported if not name.startswith("encodings.")]
seen = {"asked": asked_by_imports, "connecting": connecting, "imported": len(imported), "later": sorted(later)}
print(json.dumps(seen))
"""


def test_a_spare_has_imported_all_but_the_model_and_asked_for_no_gpu() -> None:
    """A process that asks before it is given its own GPUs sees all of them from then on."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["asked"] == []
    assert seen["connecting"] == ["torch", "deployments.stages.gang.rank"], "at once"
    assert seen["imported"] > 3000
    assert len(seen["later"]) < 40, seen["later"]


def test_what_cannot_be_imported_leaves_the_process_to_say_so_when_it_matters(
    ray_cluster: None, monkeypatch: Any, capfd: Any
) -> None:
    """Ray is asked which GPUs are this process's: without a cluster it would start one."""
    monkeypatch.setattr(spares, "LOADING", ("no_such_library",))
    monkeypatch.setattr(spares, "_PREPARATION", [])
    spares.prepare()
    spares.wait_until_prepared()
    assert "No module named 'no_such_library'" in capfd.readouterr().err


def test_variables_name_this_project_first_and_keep_the_path() -> None:
    variables = spare_environment({"PYTHONPATH": "/somewhere"})
    assert variables["PYTHONPATH"] == f"{ROOT}:/somewhere"
    module, _, name = variables[HOOK].rpartition(".")
    assert getattr(sys.modules[module], name) is spares.prepare


@ray.remote(num_cpus=0.1)
class Process:
    """An actor that says what it is, and orders as a replica does."""

    def runtime_env(self) -> str:
        return own_runtime_env()

    def age_s(self) -> float:
        return time.time() - psutil.Process().create_time()

    def pid(self) -> int:
        return psutil.Process().pid

    def raylet(self) -> int:
        return psutil.Process().ppid()

    def order(self, wanted: Mapping[str, int]) -> None:
        spares._top_up(wanted)


def test_a_spare_is_ordered_once_and_becomes_the_next_that_starts_like_it(ray_cluster: None) -> None:
    light = {"env_vars": {HOOK: "gc.collect"}}
    gang: Any = Process.options(runtime_env=light).remote()
    replica: Any = Process.remote()
    runtime_env, raylet = ray.get(gang.runtime_env.remote()), psutil.Process(ray.get(replica.raylet.remote()))
    assert not spares_of(raylet, runtime_env)
    for _ in range(2):  # the second time it is there, or about to be
        ray.get(replica.order.remote({runtime_env: 1}))
    wait_until(lambda: any(is_idle(one) for one in spares_of(raylet, runtime_env)), "a spare")
    (spare,) = spares_of(raylet, runtime_env)
    other: Any = Process.remote()
    assert ray.get(other.pid.remote()) != spare.pid, "its variables are others"
    successor: Any = Process.options(runtime_env=light).remote()
    assert ray.get(successor.pid.remote()) == spare.pid
    assert not spares_of(raylet, runtime_env)
    for actor in (gang, replica, other, successor):
        ray.kill(actor)
