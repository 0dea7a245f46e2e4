"""`serve deploy` of a changed file while clients ask replaces the changes gang by gang, and keeps the rest."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from numpy.typing import NDArray

from benchmarks.serving.nodes import HOST, ROOT
from deployments.cli.serving import parse_config, reserved_port
from deployments.names import own_version
from tests.deployments.support.bare import assert_same_picture, bare_frames
from tests.deployments.support.commands import short_folder
from tests.deployments.support.fake_nodes import FakeNodes, fake_nodes
from tests.deployments.support.live import asked_for, config_of, is_healthy, picture, pixels_of, title_of, wait_until
from tests.support.patience import PATIENCE_S

pytestmark = [pytest.mark.ray, pytest.mark.slow]

MODELS = dict.fromkeys(("changed", "kept"), ROOT / "pipelines" / "checkpoints" / "flux-shapes")
SHARING = ("one", "other")
NUM_GANGS = 2
LONG = {"num_inference_steps": 24}
NUM_CLIENTS = 2
NEW_VERSION = "99.0"
CHANGES = {
    "deployments/names.py": ("        return version(DISTRIBUTION)", f"        return {NEW_VERSION!r}"),
    "pipelines/blocks/opened.py": (".manual_seed(request.seed)", ".manual_seed(request.seed + 1)"),
}
"""Changes of the next release: a version in the API, and the first noise of gangs."""
ROLLOUT_S = 3 * PATIENCE_S
"""Time for one gang after the other to start its processes on busy cores."""


@pytest.fixture(scope="module")
def cluster(ray_cluster: None) -> Iterator[FakeNodes]:
    """Start a head alone, which has room for all gangs."""
    with short_folder() as folder, fake_nodes(folder, idle_timeout_s=PATIENCE_S) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def document() -> Iterator[dict[str, Any]]:
    document = config_of(MODELS, num_ranks=1).model_dump(mode="json")
    for model in document["applications"][0]["args"]["models"]:
        model["stages"] = "together"
    model_of(document, "changed")["denoiser"]["num_replicas"] = NUM_GANGS
    with reserved_port(HOST) as port:
        yield document | {"http_options": {"host": HOST, "port": port}}


@pytest.fixture(scope="module")
def url(cluster: FakeNodes, document: dict[str, Any]) -> str:
    cluster.deploy(parse_config(document))
    url = f"http://{HOST}:{document['http_options']['port']}"
    wait_until(lambda: is_healthy(url), "the application is ready", patience_s=ROLLOUT_S)
    return url


@pytest.fixture(scope="module")
def pictures(url: str) -> dict[str, list[bytes]]:
    """Return the files of two seeds by model; the model's name is in them."""
    made = {model: [picture(url, model=model, seed=seed, **LONG) for seed in range(2)] for model in MODELS}
    for files in made.values():
        for seed, data in enumerate(files):
            assert_same_picture(pixels_of(data), bare_frames(MODELS, seed=seed, **LONG)[0])
    return made


def model_of(document: dict[str, Any], name: str) -> dict[str, Any]:
    models: list[dict[str, Any]] = document["applications"][0]["args"]["models"]
    return next(model for model in models if model["name"] == name)


def processes(deployment: str) -> set[int]:
    """Return the process ids of the replicas of a deployment."""
    prefix = f"ray::ServeReplica:troupe:{deployment}"
    return {one.pid for one in psutil.process_iter() if title_of(one).startswith(prefix)}


def gangs(cluster: FakeNodes, model: str, num: int) -> dict[str, str]:
    """Return the gangs of ``model`` once there are ``num``: while Serve builds a new version it names none."""
    found: dict[str, str] = {}

    def are_there() -> bool:
        found.clear()
        found.update(cluster.gangs(f"Denoiser-{model}"))
        return len(found) == num

    wait_until(are_there, f"{num} gangs of {model}", patience_s=ROLLOUT_S)
    return found


@contextmanager
def load(url: str, pictures: dict[str, list[bytes]]) -> Iterator[None]:
    """Run two clients of each model, and check each answer."""
    with ExitStack() as stack:
        for model in MODELS:
            stack.enter_context(asked_for(url, pictures[model], num_clients=2, model=model, **LONG))
        yield


@contextmanager
def most_gangs(cluster: FakeNodes, model: str) -> Iterator[list[int]]:
    """Yield a list that has, after the block, the largest number of gangs of ``model`` alive at once."""
    over, most = threading.Event(), [0]

    def look() -> None:
        while not over.wait(0.5):
            alive = [pids for pids in cluster.rank_pids(model) if all(map(psutil.pid_exists, pids))]
            most[0] = max(most[0], len(alive))

    with ThreadPoolExecutor(1) as thread:
        looking = thread.submit(look)
        try:
            yield most
        finally:
            over.set()
            looking.result()


def test_a_changed_model_is_replaced_gang_by_gang_and_no_other(
    cluster: FakeNodes, url: str, document: dict[str, Any], pictures: dict[str, list[bytes]]
) -> None:
    before = {model: cluster.gangs(f"Denoiser-{model}") for model in MODELS}
    kept = {name: processes(f"{name}-kept") for name in ("Denoiser", "Codec")}
    model_of(document, "changed")["denoiser"]["max_waiting_jobs"] = 7
    with load(url, pictures), most_gangs(cluster, "changed") as most:
        cluster.deploy(parse_config(document))

        def is_replaced() -> bool:
            now = cluster.gangs("Denoiser-changed")
            return len(now) == NUM_GANGS and not now.keys() & before["changed"].keys()

        wait_until(is_replaced, "all gangs are new ones", patience_s=ROLLOUT_S)
    assert most == [NUM_GANGS], "never more at once"
    assert cluster.gangs("Denoiser-kept") == before["kept"]
    assert {name: processes(f"{name}-kept") for name in kept} == kept


def test_another_gang_leaves_the_first_alone(
    cluster: FakeNodes, url: str, document: dict[str, Any], pictures: dict[str, list[bytes]]
) -> None:
    before = {model: cluster.gangs(f"Denoiser-{model}") for model in MODELS}
    model_of(document, "kept")["denoiser"]["num_replicas"] = 2
    with load(url, pictures):
        cluster.deploy(parse_config(document))
        now = gangs(cluster, "kept", num=2)
    assert before["kept"].keys() < now.keys()
    assert cluster.gangs("Denoiser-changed") == before["changed"]


def test_a_model_of_one_gang_keeps_its_requests_waiting_for_the_next(
    cluster: FakeNodes, url: str, document: dict[str, Any], pictures: dict[str, list[bytes]]
) -> None:
    model_of(document, "changed")["denoiser"]["num_replicas"] = 1
    cluster.deploy(parse_config(document))
    (before,) = gangs(cluster, "changed", num=1)
    model_of(document, "changed")["denoiser"]["max_waiting_jobs"] = 8
    with load(url, pictures), most_gangs(cluster, "changed") as most:
        cluster.deploy(parse_config(document))
        wait_until(lambda: cluster.gangs("Denoiser-changed").keys() - {before}, "another gang", patience_s=ROLLOUT_S)
    assert most == [1]


def test_models_that_share_are_added_and_replaced_together(
    cluster: FakeNodes, url: str, document: dict[str, Any], pictures: dict[str, list[bytes]]
) -> None:
    before, models = gangs(cluster, "kept", num=2), document["applications"][0]["args"]["models"]
    alone = model_of(document, "changed")
    gang = alone["denoiser"] | {"num_replicas": 1}
    models += [alone | {"name": name, "share": "both", "denoiser": dict(gang)} for name in SHARING]
    with asked_for(url, pictures["kept"], model="kept", **LONG):
        cluster.deploy(parse_config(document))
        own = {name: gangs(cluster, name, num=1) for name in SHARING}
        wait_until(lambda: is_healthy(url), "all models are ready", patience_s=ROLLOUT_S)
    made = {name: [picture(url, model=name, seed=0, **LONG)] for name in SHARING}
    model_of(document, SHARING[0])["denoiser"] |= {"max_waiting_jobs": 9}
    with ExitStack() as stack:
        for name in SHARING:
            stack.enter_context(asked_for(url, made[name], model=name, **LONG))
        cluster.deploy(parse_config(document))
        for name in SHARING:
            (gang,) = own[name]
            wait_until(lambda: cluster.gangs(f"Denoiser-{name}").keys() - {gang}, "another", patience_s=ROLLOUT_S)  # noqa: B023
    assert gangs(cluster, "kept", num=2) == before


def write_next_release(folder: Path) -> None:
    """Copy the packages with ``CHANGES``."""
    for package in ("engines", "pipelines", "deployments"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__", "checkpoints"))
    (folder / "pipelines" / "checkpoints").symlink_to(ROOT / "pipelines" / "checkpoints")
    for name, (old, new) in CHANGES.items():
        text = (folder / name).read_text()
        assert text.count(old) == 1
        (folder / name).write_text(text.replace(old, new))


@contextmanager
def clients(url: str) -> Iterator[list[bytes]]:
    """Run clients that request one picture until the block ends. Yield the answers, none of which may be an error."""
    enough, answers = threading.Event(), list[bytes]()

    def ask() -> None:
        while not enough.is_set():
            answers.append(picture(url, model="changed", seed=0, **LONG))

    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        asking = [threads.submit(ask) for _ in range(NUM_CLIENTS)]
        try:
            yield answers
        finally:
            enough.set()
    for client in asking:
        client.result()


def version_of(url: str) -> str:
    return str(httpx.get(f"{url}/openapi.json", timeout=PATIENCE_S).json()["info"]["version"])


def test_the_next_release_of_the_code_replaces_every_process_and_loses_no_request(
    cluster: FakeNodes, url: str, document: dict[str, Any], tmp_path: Path
) -> None:
    """There are two gangs; while they are replaced, answers are those of one release or of the other."""
    ingress = cluster.gangs("Ingress").keys()
    document["applications"][0]["args"]["models"] = [model_of(document, "changed")]
    model_of(document, "changed")["denoiser"]["num_replicas"] = NUM_GANGS
    cluster.deploy(parse_config(document))

    def is_rolled_out() -> bool:
        now = cluster.gangs("Ingress").keys()
        return len(now) == 1 and not now & ingress and not cluster.gangs("Denoiser-kept")

    wait_until(is_rolled_out, "one model alone is served", patience_s=ROLLOUT_S)
    before = gangs(cluster, "changed", num=NUM_GANGS)
    others = {name: cluster.gangs(name).keys() for name in ("Ingress", "Codec-changed")}
    old_HWC, new_HWC = (bare_frames(MODELS, seed=seed, **LONG)[0] for seed in (0, 1))
    old, old_version = picture(url, model="changed", seed=0, **LONG), version_of(url)
    assert_same_picture(pixels_of(old), old_HWC)
    write_next_release(tmp_path)
    document["applications"][0]["runtime_env"] = {"env_vars": {"PYTHONPATH": str(tmp_path)}}
    with clients(url) as answers, most_gangs(cluster, "changed") as most:
        cluster.deploy(parse_config(document))

        def is_replaced() -> bool:
            now = cluster.gangs("Denoiser-changed")
            is_of_gangs = len(now) == NUM_GANGS and not now.keys() & before.keys()
            rest = {name: cluster.gangs(name).keys() for name in others}
            return is_of_gangs and all(rest[name] and not rest[name] & others[name] for name in others)

        wait_until(is_replaced, "all processes are of the next release", patience_s=2 * ROLLOUT_S)
        num_before = len(answers)
        wait_until(lambda: len(answers) > num_before + NUM_CLIENTS, "answers of the next release")
    assert most == [NUM_GANGS], "never more at once"
    assert (old_version, version_of(url)) == (own_version(), NEW_VERSION)
    pixels = [pixels_of(data) for data in answers]
    is_new = [is_same(one, new_HWC) for one in pixels]
    assert all(new or is_same(one, old_HWC) for new, one in zip(is_new, pixels, strict=True))
    assert not is_new[0]
    assert is_new[-1]
    assert_same_picture(pixels_of(picture(url, model="changed", seed=0, **LONG)), new_HWC)


def is_same(one_HWC: NDArray[Any], other_HWC: NDArray[Any]) -> bool:
    """See ``assert_same_picture``."""
    try:
        assert_same_picture(one_HWC, other_HWC)
    except AssertionError:
        return False
    return True
