"""`ray up` with ``ray_cluster_hosts.yaml``: its mounts and its commands make a cluster that serves."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from tests.deployments.support.bare import assert_same_picture, bare_frames
from tests.deployments.support.commands import config_file, short_folder
from tests.deployments.support.live import config_of
from tests.support.machines import HEAD, ROOT, WORKER

MODELS = {"flux-shapes": ROOT / "pipelines" / "checkpoints" / "flux-shapes"}
UNSHARE = (
    "unshare",
    "--user",
    "--map-root-user",
    "--net",
    "--mount",
    "--pid",
    "--fork",
    "--mount-proc",
    "--kill-child",
)


def may_make_machines() -> bool:
    probe = [*UNSHARE, "unshare", "--net", "ip", "link", "set", "lo", "up"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


def cluster_file() -> dict[str, Any]:
    """Return ``ray_cluster_hosts.yaml`` with the test's own hosts; their ssh needs no key."""
    written: dict[str, Any] = yaml.safe_load((ROOT / "ray_cluster_hosts.yaml").read_text())
    hosts = {"head_ip": HEAD, "worker_ips": [WORKER]}
    return written | {"provider": written["provider"] | hosts, "auth": {"ssh_user": written["auth"]["ssh_user"]}}


def commands_of_pip(cluster: dict[str, Any], *kinds: str) -> list[str]:
    commands = [command for kind in kinds for command in cluster[kind] if "bin/pip " in command]
    return [command.partition("bin/pip ")[2].replace("'", "") for command in commands]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.skipif(not may_make_machines(), reason="needs namespaces of its own (unshare --user)")
def test_its_mounts_and_commands_make_a_cluster_that_serves() -> None:
    cluster = cluster_file()
    # The size of a machine, so that the gang fits the one without the other deployments.
    cpus_per_rank = ((os.cpu_count() or 1) - 0.2) / 2
    config = config_of({"flux-shapes": Path("flux-shapes")}, cpus_per_rank=cpus_per_rank).with_http(port=8000)
    with short_folder() as folder:
        (folder / "cluster.yaml").write_text(yaml.safe_dump(cluster))
        config_file(config, folder)
        run = subprocess.run(
            [*UNSHARE, sys.executable, "-m", "tests.support.machines", str(folder)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stderr[-5000:]
        seen = json.loads((folder / "seen.json").read_text())
        assert seen.pop("on the worker") >= 2, "the gang, or the deployments that do not fit beside it"
        assert seen == {"imported": f"{folder}/{HEAD}/troupe/deployments/__init__.py", "ranks": 2}
        drawn = np.asarray(Image.open(io.BytesIO((folder / HEAD / "picture.png").read_bytes())).convert("RGB"))
        assert_same_picture(drawn, bare_frames(MODELS, seed=1, size="128x128", num_inference_steps=20)[0])
        for address, kinds in {HEAD: ("setup_commands", "head_setup_commands"), WORKER: ("setup_commands",)}.items():
            assert_set_up(folder / address, folder / "laptop", cluster, kinds)


def assert_set_up(home: Path, laptop: Path, cluster: dict[str, Any], kinds: tuple[str, ...]) -> None:
    token = home / ".ray" / "auth_token"
    assert token.read_text() == (laptop / ".ray" / "auth_token").read_text()
    assert token.stat().st_mode & 0o777 == 0o600
    mounts = [Path(target.replace("~", str(home))) for target in cluster["file_mounts"]]
    assert [mount for mount in mounts if not mount.exists()] == []
    asked = [line.split(maxsplit=1)[1] for line in (home / "pip.log").read_text().splitlines()]
    assert asked == commands_of_pip(cluster, *kinds)
