"""kubernetes/: Kubernetes and KubeRay accept the files, every gang has room, and strangers have no access.

The parts are joined like kustomize joins them; if `kubectl` is installed, it must agree.
"""

from __future__ import annotations

import copy
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import kubernetes_validate
import pytest
import yaml

from deployments import worker_shim
from deployments.cli.cluster import SERVE_ENVIRONMENT
from deployments.cli.serving import end_limit_s, load_config, parse_config
from deployments.config import ServeConfig
from deployments.door.door_settings import DoorSettings
from deployments.settings import PREFIX, Settings
from tests.deployments.support.commands import assert_one_line, troupe
from tests.support.fenced import ROOT
from tests.support.images import CUDA, image
from tests.test_ray_cluster import gang_fits
from tests.test_ray_up import UNSHARE

FOLDER = ROOT / "kubernetes"
VERSION = "1.34"
"""Version of Kubernetes."""
GPU = "nvidia.com/gpu"
RAY_NODE = {"ray.io/is-ray-node": "yes"}
"""A label that KubeRay gives to its pods."""
CONFIGS = sorted((ROOT / "deployments" / "configs").glob("gpu*.yaml"))
Object = dict[str, Any]


@cache
def parts() -> tuple[Object, ...]:
    """Return all objects of kubernetes/base."""
    files = yaml.safe_load((FOLDER / "base" / "kustomization.yaml").read_text())["resources"]
    texts = [(FOLDER / "base" / name).read_text() for name in files]
    return tuple(one for text in texts for one in yaml.safe_load_all(text))


def part(kind: str, name: str = "troupe") -> Object:
    (found,) = (one for one in parts() if one["kind"] == kind and one["metadata"]["name"] == name)
    return copy.deepcopy(found)


def service() -> Object:
    """Return the RayService, with what is copied into it."""
    written: Object = yaml.safe_load((FOLDER / "service" / "rayservice.yaml").read_text())
    written["spec"] |= {
        "rayClusterConfig": part("RayCluster")["spec"],
        "serveConfigV2": (FOLDER / "base" / "config.yaml").read_text(),
    }
    return written


def groups() -> dict[str, Object]:
    """Return the pods of the head, "", and of each group of workers."""
    spec = part("RayCluster")["spec"]
    workers = {group["groupName"]: group["template"] for group in spec["workerGroupSpecs"]}
    return {"": spec["headGroupSpec"]["template"], **workers}


def pods() -> dict[str, Object]:
    """Return the specs of all pods, by name of the group, and the door's."""
    door = part("Deployment", "troupe-door")["spec"]["template"]
    return {name: template["spec"] for name, template in {**groups(), "door": door}.items()}


def container(group: str) -> Object:
    (only,) = pods()[group]["containers"]
    return dict(only)


def policy(name: str) -> Object:
    return dict(part("NetworkPolicy", name)["spec"])


@pytest.fixture(scope="module")
def config() -> ServeConfig:
    return load_config(FOLDER / "base" / "config.yaml")


def problems_of(written: Object) -> Iterator[str]:
    """Yield what KubeRay's schema refuses, and what Kubernetes' refuses of the pods in it."""
    schema = yaml.safe_load((ROOT / "tests" / "support" / "kuberay.yaml").read_text())
    for error in jsonschema.Draft202012Validator(schema).iter_errors(written):
        yield f"{list(error.absolute_path)}: {error.message}"
    cluster = written["spec"].get("rayClusterConfig", written["spec"])
    templates = [cluster["headGroupSpec"]["template"], *(group["template"] for group in cluster["workerGroupSpecs"])]
    for template in templates:
        try:
            kubernetes_validate.validate(
                {"apiVersion": "v1", "kind": "PodTemplate", "template": template}, VERSION, True
            )
        except kubernetes_validate.ValidationError as error:
            yield error.message


def test_kubernetes_accepts_it() -> None:
    own = [one for one in parts() if not one["apiVersion"].startswith("ray.io/")]
    assert {one["kind"] for one in own} >= {
        "Namespace",
        "NetworkPolicy",
        "Deployment",
        "Service",
        "PodDisruptionBudget",
    }
    for one in own:
        kubernetes_validate.validate(one, VERSION, strict=True)


def test_kuberay_accepts_cluster_and_service() -> None:
    assert list(problems_of(part("RayCluster"))) == []
    assert list(problems_of(service())) == []


def test_misspelt_keys_are_refused() -> None:
    wrong, worse, pod = service(), part("RayCluster"), part("RayCluster")
    wrong["spec"]["rayClusterConfig"]["enableInTreeAutoscaler"] = True
    worse["spec"]["workerGroupSpecs"][0]["minReplicas"] = "0"
    pod["spec"]["headGroupSpec"]["template"]["spec"]["enableServiceLink"] = False
    for written, told in ((wrong, "enableInTreeAutoscaler"), (worse, "'0'"), (pod, "enableServiceLink")):
        (problem,) = problems_of(written)
        assert told in problem


@pytest.mark.parametrize("variant", ["cluster", "service"])
def test_kustomize_puts_the_parts_together(variant: str) -> None:
    """It agrees with this file."""
    if (kubectl := shutil.which("kubectl")) is None:
        pytest.skip("kubectl is not installed (Debian: apt-get install kubernetes-client)")
    made = subprocess.run([kubectl, "kustomize", str(FOLDER / variant)], capture_output=True, text=True, check=True)
    objects = list(yaml.safe_load_all(made.stdout.replace("registry.example.com/troupe:cuda", "troupe:cuda")))
    (ray,) = (one for one in objects if one["apiVersion"] == "ray.io/v1")
    assert ray["spec"] == {"cluster": part("RayCluster"), "service": service()}[variant]["spec"]
    assert all(one["metadata"].get("namespace", "troupe") == "troupe" for one in objects)
    assert len(objects) == len(parts()) + 1, "the configuration's ConfigMap"
    (door,) = (one for one in objects if one["kind"] == "Deployment")
    (volume,) = door["spec"]["template"]["spec"]["volumes"]
    assert volume["configMap"]["name"] in {one["metadata"]["name"] for one in objects if one["kind"] == "ConfigMap"}
    (proxy,) = (one for one in objects if one["metadata"]["name"] == "troupe-proxy")
    served = {"ray.io/serve": "true"}, {"ray.io/cluster": "troupe", "ray.io/node-type": "head"}
    assert proxy["spec"]["selector"] == served[variant == "cluster"]


def test_the_application_is_valid_and_its_gangs_find_room(config: ServeConfig) -> None:
    assert parse_config(yaml.safe_load(service()["spec"]["serveConfigV2"])) == config
    assert config.app.api.storage
    assert not config.app.api.database, "TROUPE_DATABASE_URL"
    assert_finds_a_node(config)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_gpu_config_finds_a_node(path: Path) -> None:
    assert_finds_a_node(load_config(path))


def assert_finds_a_node(config: ServeConfig) -> None:
    limits = [container(name)["resources"]["limits"] for name in groups()]
    nodes = [{"CPU": int(limit["cpu"]), "GPU": int(limit.get(GPU, 0))} for limit in limits]
    for model in config.app.models:
        assert any(gang_fits(model, node) for node in nodes), f"no group has room for a gang of {model.name}"


def test_workers_come_and_go_with_gangs() -> None:
    spec = part("RayCluster")["spec"]
    assert spec["enableInTreeAutoscaling"] is True
    assert spec["headGroupSpec"]["rayStartParams"]["num-gpus"] == "0"
    assert GPU not in container("")["resources"]["limits"]
    for group in spec["workerGroupSpecs"]:
        assert group["minReplicas"] == group["replicas"] == 0 < group["maxReplicas"]
        resources = container(group["groupName"])["resources"]
        assert resources["requests"] == resources["limits"]
        assert f"gpu{resources['limits'][GPU]}" == group["groupName"]


def test_pods_for_gangs_import_libraries_ahead() -> None:
    hooks = {name: container(name).get("lifecycle") for name in groups()}
    assert hooks.pop("") is None, "the head has no gangs"
    (hook,) = {str(hook): hook for hook in hooks.values() if hook}.values()
    assert all(hooks.values())
    shell, option, command = hook["postStart"]["exec"]["command"]
    assert (shell, option) == ("sh", "-c")
    assert command.endswith(f" -m {worker_shim.__name__} {worker_shim.WARM} || true"), "a hook that fails ends the pod"


def mounted_at_tmp(folder: Path) -> str:
    """Return the command that mounts ``folder`` in place of /tmp, with the project in it if that is below /tmp."""
    mount = f"mount --rbind {folder} /tmp"
    if not ROOT.is_relative_to("/tmp"):
        return mount
    place = folder / ROOT.relative_to("/tmp")
    place.mkdir(parents=True)
    return f"mount --bind {ROOT} {place}; {mount}; cd {ROOT}"


@pytest.mark.skipif(
    subprocess.run([*UNSHARE, "true"], check=False).returncode != 0,
    reason="needs namespaces of its own (unshare --user)",
)
def test_the_hook_finds_the_pod_s_raylet(tmp_path: Path) -> None:
    """The raylet starts after the hook, as in a pod. It is a process of that name; the namespace has no other."""
    shutil.copy("/bin/sleep", tmp_path / "raylet")
    command = shlex.join(container("gpu1")["lifecycle"]["postStart"]["exec"]["command"])
    script = f"{mounted_at_tmp(tmp_path)}; (sleep 1; exec /tmp/raylet 600) & {command}; ls /tmp/troupe_0_$!_*"
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    for name in (worker_shim.RAYLET_VARIABLE, worker_shim.DIRECTORY_VARIABLE):
        environment.pop(name, None)
    done = subprocess.run([*UNSHARE, "sh", "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert {*worker_shim.LEVELS} <= {*done.stdout.split()}, done.stderr


def test_every_node_has_the_token_and_the_same_environment() -> None:
    assert part("RayCluster")["spec"]["authOptions"] == {"mode": "token"}
    assert part("ConfigMap", "troupe-environment")["data"] == SERVE_ENVIRONMENT
    for name in groups():
        assert container(name)["envFrom"] == [
            {"configMapRef": {"name": "troupe-environment"}},
            {"secretRef": {"name": "troupe"}},
        ]


def test_the_secret_has_what_the_application_reads() -> None:
    lines = (FOLDER / "secret.env.example").read_text().splitlines()
    names = {line.lstrip("# ").partition("=")[0] for line in lines if "=" in line and "--" not in line}
    own = {name.removeprefix(PREFIX).lower() for name in names if name.startswith(PREFIX)}
    assert {"api_keys", "database_url"} <= own <= set(Settings.model_fields)
    assert {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "HF_TOKEN"} <= names


@pytest.mark.parametrize("name", ["", "gpu1", "gpu4", "gpu8", "door"])
def test_pods_run_without_rights(name: str) -> None:
    pod = pods()[name]
    user, _, group = image(CUDA).last("USER").value.partition(":")
    assert pod["securityContext"] | {"fsGroup": 0} == {
        "runAsNonRoot": True,
        "runAsUser": int(user),
        "runAsGroup": int(group),
        "fsGroup": 0,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert container(name)["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert pod.get("automountServiceAccountToken", True) is (name == ""), "the autoscaler is on the head"
    assert pod["enableServiceLinks"] is False, f"a Service called troupe sets {PREFIX}PORT"
    mounted = {mount["mountPath"] for mount in container(name)["volumeMounts"]}
    assert name == "door" or {*image(CUDA).last("VOLUME").words, "/dev/shm"} <= mounted
    assert {mount["name"] for mount in container(name)["volumeMounts"]} == {one["name"] for one in pod["volumes"]}


def test_pods_have_the_time_to_end() -> None:
    needed_s = end_limit_s(DoorSettings().drain_s)
    assert all(pod["terminationGracePeriodSeconds"] > needed_s for name, pod in pods().items() if name != "door")


def test_the_door_is_a_command_of_ours() -> None:
    door = container("door")
    name, *args = door["args"]
    assert name == "door"
    assert args[:2] == ["--to", "troupe-proxy:8000"]
    away = ["--to", "nowhere", *args[2:-1], str(FOLDER / "base" / "config.yaml")]
    assert_one_line(troupe(name, *away), "--to is nowhere")
    assert [probe for probe in ("startupProbe", "readinessProbe", "livenessProbe") if probe not in door] == []


def test_services_lead_to_pods(config: ServeConfig) -> None:
    door, proxy = part("Service"), part("Service", "troupe-proxy")
    labels = part("Deployment", "troupe-door")["spec"]["template"]["metadata"]["labels"]
    assert door["spec"]["selector"] == labels
    assert proxy["spec"]["selector"] == {"ray.io/cluster": "troupe", "ray.io/node-type": "head"}
    assert config.http_options.host == "0.0.0.0", "the pod's host"
    (port,) = proxy["spec"]["ports"]
    assert port["targetPort"] == config.http_options.port
    for name in groups():
        opened = {one["name"]: one["containerPort"] for one in container(name)["ports"]}
        assert (opened["serve"], opened["metrics"]) == (config.http_options.port, config.app.metrics.number)


def sources(name: str, port: int) -> list[Object]:
    """Return the sources that may reach ``port`` of the pods of a policy; an empty selector is everybody."""
    rules = [
        rule for rule in policy(name)["ingress"] if port in [one["port"] for one in rule.get("ports", [{"port": port}])]
    ]
    return [source for rule in rules for source in rule.get("from", [{}])]


def test_nobody_but_the_door_reaches_ray() -> None:
    assert policy("nothing-else") == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    nodes = {"podSelector": {"matchLabels": RAY_NODE}}
    door = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "troupe-door"}}}
    operator = {
        "namespaceSelector": {},
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}},
    }
    assert policy("ray")["podSelector"] == nodes["podSelector"]
    assert sources("ray", 6379) == [nodes], "ports that run code"
    assert sources("ray", 8000) == [nodes, door, operator]
    assert sources("ray", 8265) == [nodes, operator]
    assert policy("door")["podSelector"] == door["podSelector"]
    assert sources("door", 8080) == [{}]
    assert sources("door", 8000) == []


def test_nobody_asks_the_cloud_for_credentials() -> None:
    """They are at 169.254.169.254, and elsewhere in that network."""
    others = []
    for name in ("ray", "door"):
        for rule in policy(name)["egress"]:
            blocks = [to["ipBlock"] for to in rule["to"] if "ipBlock" in to]
            if {one["port"] for one in rule.get("ports", ())} == {53}:
                assert blocks == [{"cidr": "169.254.20.10/32"}], "for names only"
            else:
                others += blocks
    assert others == [{"cidr": "0.0.0.0/0", "except": ["169.254.0.0/16"]}]
