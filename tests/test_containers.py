"""containers/: images run as an ordinary user, and the parts in the file for one machine find each other."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest
import yaml
from pydantic_core import MultiHostUrl

from deployments.cli.preflight import environment_problems
from deployments.cli.serving import end_limit_s, load_config
from deployments.config import HttpOptions, ServeConfig
from deployments.database.database import database_url
from deployments.door.door_settings import DoorSettings
from deployments.names import HEALTH
from tests.deployments.support import s3
from tests.deployments.support.commands import troupe
from tests.support.fenced import ROOT
from tests.support.images import CPU, CUDA, DOCKERFILE, image
from tests.test_ray_cluster import INSTALLED

FOLDER = ROOT / "containers"
TARGETS = (CPU, CUDA)
REQUIRED = re.compile(r"\$\{(\w+):\?[^}]*\}")
SECRETS = {"TROUPE_API_KEYS": "a,b", "POSTGRES_PASSWORD": "c0ffee", "S3_SECRET_KEY": "s3cret", "GRAFANA_PASSWORD": "g"}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    """Return compose.yaml with ``SECRETS`` in it."""
    text = REQUIRED.sub(lambda match: SECRETS[match[1]], (FOLDER / "compose.yaml").read_text())
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


@pytest.fixture(scope="module")
def config() -> ServeConfig:
    return load_config(FOLDER / "config.yaml")


# The images.


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_runs_as_a_user_without_rights(target: str) -> None:
    assert image(target).last("USER").value == "10001:10001"
    (user,) = (one.value for one in image(target).all("RUN") if "useradd" in one.value)
    assert "--uid 10001 " in user
    assert set(image(target).last("VOLUME").words) == {word for word in user.split() if word.startswith("/var/")}


@pytest.mark.parametrize("target", TARGETS)
def test_what_an_image_starts_is_ours_behind_an_init(target: str) -> None:
    init, _, program, *args = [*image(target).last("ENTRYPOINT").words, *image(target).last("CMD").words]
    assert (init, program) == ("tini", "troupe")
    printed = troupe(*args, "--print-config")
    assert printed.exit_code == 0, printed.output
    assert yaml.safe_load(printed.output)["http_options"]["host"] == "0.0.0.0", "the container's host"


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_has_what_its_commands_call(target: str) -> None:
    (packages,) = (one.value for one in image(target).all("RUN") if "apt-get install" in one.value)
    check = image(target).last("HEALTHCHECK").value.partition("CMD ")[2]
    (*_, url) = yaml.safe_load(check)
    assert url == f"http://127.0.0.1:{HttpOptions().port}{HEALTH}"
    for program in ("tini", "wget", "gcc", "g++"):
        assert f" {program} " in packages


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_is_made_of_what_an_install_needs(target: str) -> None:
    assert set(image(target).sources) == INSTALLED
    ignored = (FOLDER / "Dockerfile.dockerignore").read_text().split()
    assert {line.removeprefix("!") for line in ignored if line.startswith("!")} == INSTALLED
    optional = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(image(target).arguments["EXTRAS"].split(",")) <= set(optional)


@pytest.mark.parametrize("target", TARGETS)
def test_the_environment_of_an_image_is_one_to_serve_in(
    target: str, config: ServeConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in image(target).environment.items():
        monkeypatch.setenv(name, value.replace("/var", str(tmp_path)))
    assert list(environment_problems(config)) == []


# One machine.


def test_the_parts_of_one_machine_have_the_same_secrets(compose: dict[str, Any], config: ServeConfig) -> None:
    services = compose["services"]
    environment = services["troupe"]["environment"]
    postgres, storage = services["postgres"]["environment"], yaml.safe_load(compose["configs"]["s3"]["content"])
    (host,) = MultiHostUrl(str(database_url(environment["TROUPE_DATABASE_URL"]).render_as_string(False))).hosts()
    assert (host["host"], host["username"], host["password"]) == (
        "postgres",
        postgres["POSTGRES_USER"],
        postgres["POSTGRES_PASSWORD"],
    )
    assert environment["TROUPE_DATABASE_URL"].endswith(f"/{postgres['POSTGRES_DB']}")
    (identity,) = storage["identities"]
    keys = {"accessKey": environment["AWS_ACCESS_KEY_ID"], "secretKey": environment["AWS_SECRET_ACCESS_KEY"]}
    assert identity["credentials"] == [keys]
    endpoint = httpx.URL(environment["AWS_ENDPOINT_URL"])
    assert endpoint.host in services
    assert f"-s3.port={endpoint.port}" in services["storage"]["command"]
    assert config.app.api.storage.startswith("s3://")
    assert not config.app.api.database


def test_every_secret_is_asked_for_and_explained() -> None:
    asked = set(REQUIRED.findall((FOLDER / "compose.yaml").read_text()))
    example = dict(line.split("=") for line in (FOLDER / "env.example").read_text().splitlines() if "=" in line)
    assert {name for name in example if not name.startswith("#")} == asked == set(SECRETS)
    assert not any(example[name] for name in asked), "an example that works is a secret that everybody knows"


def test_the_bucket_is_made_once(compose: dict[str, Any], config: ServeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    service, bucket = compose["services"]["bucket"], config.app.api.storage.removeprefix("s3://").partition("/")[0]
    assert service["entrypoint"] == ["python", "-c"]
    with s3.server() as endpoint:
        for name, value in s3.environment(endpoint).items():
            monkeypatch.setenv(name, value)
        client = boto3.client("s3", endpoint_url=endpoint)
        before = {one["Name"] for one in client.list_buckets()["Buckets"]}  # the server's state is that of its process
        for _ in range(2):
            subprocess.run([sys.executable, "-c", *service["command"]], check=True)
        found = {one["Name"] for one in client.list_buckets()["Buckets"]}
    assert found - before == {bucket}


def test_nothing_but_published_ports_is_reached_from_outside(compose: dict[str, Any]) -> None:
    services = compose["services"]
    published = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert set(published) == {"troupe", "prometheus", "grafana"}
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)
    assert compose["networks"]["inside"] == {"internal": True}
    assert all(services[name]["networks"] == ["inside"] for name in services.keys() - published)


def test_mounted_files_are_there(compose: dict[str, Any]) -> None:
    volumes = [volume for service in compose["services"].values() for volume in service.get("volumes", ())]
    mounts = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", volume).partition(":")[0] for volume in volumes]
    files = [mount for mount in mounts if mount.startswith(".")]
    assert len(files) > 5
    assert [name for name in files if not (FOLDER / name).is_file()] == []
    assert {mount for mount in mounts if mount not in files} == set(compose["volumes"])


def test_it_leaves_the_server_the_time_to_end(compose: dict[str, Any]) -> None:
    assert compose["services"]["troupe"]["stop_grace_period"] == "3m"
    assert end_limit_s(DoorSettings().drain_s) < 180


def test_prometheus_and_grafana_find_what_they_show(compose: dict[str, Any], config: ServeConfig) -> None:
    services = compose["services"]
    prometheus = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    (scraped,) = prometheus["scrape_configs"]
    metrics = config.app.metrics
    assert scraped == {"job_name": "troupe", "static_configs": [{"targets": [f"troupe:{metrics.number}"]}]}
    assert metrics.host == "0.0.0.0", "the container's host"
    mounted = dict(mount.split(":")[:2] for mount in services["prometheus"]["volumes"])
    assert mounted["../docs/operate/alerts.yaml"] == f"/etc/prometheus/{prometheus['rule_files'][0]}"
    (source,) = yaml.safe_load((FOLDER / "grafana" / "datasources.yaml").read_text())["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    (provider,) = yaml.safe_load((FOLDER / "grafana" / "dashboards.yaml").read_text())["providers"]
    boards = dict(mount.split(":")[:2] for mount in services["grafana"]["volumes"])
    board = boards["../deployments/observability/grafana.json"]
    assert str(Path(board).parent) == provider["options"]["path"]


def test_the_file_for_gpus_changes_the_image_of_both_services(compose: dict[str, Any]) -> None:
    own = {name: service for name, service in compose["services"].items() if "build" in service}
    other = yaml.safe_load((FOLDER / "compose.cuda.yaml").read_text())["services"]
    for target, services in ((CPU, own), (CUDA, other)):
        assert {name: service["image"] for name, service in services.items()} == {
            "troupe": f"troupe:{target}",
            "bucket": f"troupe:{target}",
        }
        assert {service["build"]["target"] for service in services.values()} == {target}
    assert (FOLDER / own["troupe"]["build"]["context"] / own["troupe"]["build"]["dockerfile"]).resolve() == DOCKERFILE


@pytest.mark.parametrize("files", [("compose.yaml",), ("compose.yaml", "compose.cuda.yaml")], ids=len)
def test_compose_accepts_the_files(files: tuple[str, ...], tmp_path: Path) -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], check=False, capture_output=True).returncode:
        pytest.skip("docker compose is not installed")
    (tmp_path / ".env").write_text("".join(f"{name}={value}\n" for name, value in SECRETS.items()))
    given = [word for name in files for word in ("--file", str(FOLDER / name))]
    command = [docker, "compose", "--env-file", str(tmp_path / ".env"), *given, "config", "--quiet"]
    checked = subprocess.run(command, check=False, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
