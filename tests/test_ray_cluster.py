"""`ray up` accepts the cluster files, which keep strangers out; AWS has a node for every shipped gang."""

from __future__ import annotations

import copy
import json
import subprocess
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import ray.autoscaler
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from deployments.cli.cluster import SERVE_ENVIRONMENT
from deployments.config import ServeConfig
from deployments.forked_workers import SHIM
from deployments.model_config import ModelConfig
from deployments.worker_shim import WARM

ROOT = Path(__file__).parents[1]
AWS, HOSTS = ROOT / "ray_cluster.yaml", ROOT / "ray_cluster_hosts.yaml"
CONFIGS = sorted((ROOT / "deployments/configs").glob("gpu*.yaml"))
START_COMMANDS = ("head_start_ray_commands", "worker_start_ray_commands")
INSTALLED = {"pyproject.toml", "README.md", "LICENSE", "constraints.txt", "engines", "pipelines", "deployments"}
"""Files that an install from the repository needs."""
REPLICA_CPUS = 1
"""At least the CPUs of any of our replicas beside its ranks."""

Node = dict[str, int]


@pytest.fixture(params=[AWS, HOSTS], ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    found: Path = request.param
    return found


@pytest.fixture
def written(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(path.read_text())
    return loaded


@pytest.fixture
def prepared(written: dict[str, Any]) -> dict[str, Any]:
    return prepare_config(copy.deepcopy(written))


@pytest.fixture
def aws() -> dict[str, Any]:
    return prepare_config(yaml.safe_load(AWS.read_text()))


def nodes(cluster: dict[str, Any]) -> dict[str, Node]:
    return {name: kind["resources"] for name, kind in cluster["available_node_types"].items()}


def test_ray_accepts_it(written: dict[str, Any], prepared: dict[str, Any]) -> None:
    schema = json.loads((Path(ray.autoscaler.__path__[0]) / "ray-schema.json").read_text())
    jsonschema.validate(written, schema)
    validate_config(prepared)


def test_ray_would_refuse_a_misspelt_key(prepared: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError, match="idle_timeout_hours"):
        validate_config(prepared | {"idle_timeout_hours": 1})


def test_the_head_has_no_gpu_and_workers_of_1_4_and_8_start_at_none(aws: dict[str, Any]) -> None:
    types = aws["available_node_types"]
    head = types.pop(aws["head_node_type"])
    assert head["resources"]["GPU"] == 0
    assert sorted(kind["resources"]["GPU"] for kind in types.values()) == [1, 4, 8]
    assert all(kind["min_workers"] == 0 < kind["max_workers"] <= aws["max_workers"] for kind in types.values())


@pytest.mark.parametrize("when", START_COMMANDS)
def test_every_node_starts_with_token_authentication(prepared: dict[str, Any], when: str) -> None:
    starts = [command for command in prepared[when] if "ray start" in command]
    assert starts
    assert all("RAY_AUTH_MODE=token" in command for command in starts)
    assert "~/.ray/auth_token" in prepared["file_mounts"]


@pytest.mark.parametrize("when", START_COMMANDS)
def test_serve_runs_on_every_node_as_it_does_in_a_cluster_of_our_own(prepared: dict[str, Any], when: str) -> None:
    starts = [command for command in prepared[when] if "ray start" in command]
    assert all(f"{name}={value} " in command for command in starts for name, value in SERVE_ENVIRONMENT.items())


def test_nodes_for_gangs_import_libraries_ahead(prepared: dict[str, Any]) -> None:
    (command,) = [one for one in prepared["worker_start_ray_commands"] if WARM in one]
    start = next(one for one in prepared["worker_start_ray_commands"] if "ray start" in one)
    assert prepared["worker_start_ray_commands"].index(command) > prepared["worker_start_ray_commands"].index(start)
    (script,) = [Path(word).relative_to("~/troupe") for word in command.split() if word.startswith("~/troupe/")]
    assert ROOT / script == SHIM
    assert start.startswith("ulimit -n 65536;"), "a zygote with lower limits forks no workers of other users than root"
    assert command.startswith("ulimit -n 65536;")


def test_nothing_but_ssh_is_open_to_the_world(path: Path, prepared: dict[str, Any], aws: dict[str, Any]) -> None:
    assert aws["provider"]["security_group"]["IpPermissions"] == []
    (head,) = [command for command in prepared["head_start_ray_commands"] if "ray start" in command]
    assert "--dashboard-host=127.0.0.1" in head
    assert "0.0.0.0" not in path.read_text()


def test_all_hosts_of_a_list_are_workers_all_the_time() -> None:
    written = yaml.safe_load(HOSTS.read_text())
    (kind,) = prepare_config(written)["available_node_types"].values()
    assert kind["min_workers"] == kind["max_workers"] == len(written["provider"]["worker_ips"]) > 0


def test_hosts_are_set_up_and_started_as_machines_on_aws_are() -> None:
    aws, hosts = (yaml.safe_load(path.read_text()) for path in (AWS, HOSTS))
    for key in ("file_mounts", "rsync_exclude", *START_COMMANDS):
        assert hosts[key] == aws[key]
    assert hosts["setup_commands"] == [one for one in aws["setup_commands"] if "cloud-init" not in one]


def test_what_is_copied_is_there_and_is_all_that_an_install_needs(prepared: dict[str, Any]) -> None:
    mounts = {local for remote, local in prepared["file_mounts"].items() if remote.startswith("~/troupe/")}
    assert [local for local in sorted(mounts) if not (ROOT / local).exists()] == []
    assert mounts == INSTALLED


def test_commands_are_shell(prepared: dict[str, Any]) -> None:
    for when in ("setup_commands", "head_setup_commands", "worker_setup_commands", *START_COMMANDS):
        script = "\n".join(prepared[when])
        checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
        assert checked.returncode == 0, checked.stderr


def gang_fits(model: ModelConfig, node: Node) -> bool:
    """Return whether one gang fits one node (it is packed strictly), beside its text encoder and decoder."""
    gang, stages = model.denoiser, (model.text_encoder, model.decoder)
    num_cpus = gang.num_ranks * gang.cpus_per_rank + REPLICA_CPUS + sum(stage.num_cpus for stage in stages)
    num_gpus = gang.num_ranks if gang.gpus_per_rank > 0 else 0
    return num_cpus <= node["CPU"] and num_gpus <= node["GPU"]


@pytest.mark.parametrize(
    "config_path", sorted((ROOT / "deployments/configs").glob("gpu*.yaml")), ids=lambda path: path.stem
)
def test_every_gpu_config_finds_a_node(aws: dict[str, Any], config_path: Path) -> None:
    config = ServeConfig.model_validate(yaml.safe_load(config_path.read_text()))
    for model in config.app.models:
        fitting = [name for name, node in nodes(aws).items() if gang_fits(model, node)]
        assert fitting, f"no node type has room for a gang of {model.denoiser.num_ranks} ranks"
