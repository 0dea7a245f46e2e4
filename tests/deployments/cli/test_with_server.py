"""``troupe serve`` runs with a key: other commands reach it, and Ctrl-C ends it. Killed in the middle of a clip and
restarted, it finishes the clip."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path

import av
import httpx
import psutil
import pytest
from typer.testing import Result

from tests.deployments.support.commands import (
    SERVING,
    Command,
    assert_one_line,
    command,
    config_file,
    short_folder,
    troupe,
)
from tests.deployments.support.live import PROMPT, TIMEOUT_S, config_of, log_texts, wait_until
from tests.support.listening import ONE_MACHINE, differences, listening, rows
from tests.support.ports import own_port
from tests.support.processes import cmdline, of_living, paths_in

pytestmark = pytest.mark.ray

KEY = "a-secret"
PROXIES = {"HTTP_PROXY": "http://127.0.0.1:9", "ALL_PROXY": "socks5://127.0.0.1:9", "no_proxy": "[::1]"}
"""Nothing listens there, and the client library takes the last for no address."""
METRICS_PORT = own_port("metrics of the server")
CLIP = {"model": "clips", "prompt": PROMPT, "seed": 3, "num_inference_steps": 60}


def client_of(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=TIMEOUT_S, headers={"Authorization": f"Bearer {KEY}"})


@pytest.fixture(scope="module")
def server(clips: Path) -> Iterator[Command]:
    with short_folder() as folder, serve(clips, folder) as server:
        server.wait_for(SERVING)
        yield server
        assert server.terminate_group() == 143, server.output
        assert "Traceback" not in server.output
        assert "GCS" not in server.output


@pytest.fixture
def url(server: Command) -> str:
    return server.wait_for(SERVING)


def serve(clips: Path, folder: Path) -> AbstractContextManager[Command]:
    """Run ``troupe serve`` with clips alone, a key, behind a proxy, and with its jobs in ``folder``."""
    config = config_file(config_of({"clips": clips}, num_ranks=1).with_metrics(METRICS_PORT), folder)
    return command("serve", config, folder=folder, env={"TROUPE_API_KEYS": KEY, **PROXIES})


def begin_clip(server: Command) -> str:
    """Return the id of a running clip."""
    with client_of(server.wait_for(SERVING)) as http:
        clip_id = str(http.post("/v1/videos", json=CLIP).raise_for_status().json()["id"])
        wait_until(lambda: int(str(status(http, clip_id)["progress"])) >= 20, "some progress")
    return clip_id


def status(http: httpx.Client, clip_id: str) -> dict[str, object]:
    return dict(http.get(f"/v1/videos/{clip_id}").raise_for_status().json())


def finish(http: httpx.Client, clip_id: str) -> bytes:
    wait_until(lambda: status(http, clip_id)["status"] in ("completed", "failed"), "the clip")
    assert status(http, clip_id)["status"] == "completed", status(http, clip_id)
    return http.get(f"/v1/videos/{clip_id}/content").raise_for_status().content


@pytest.mark.slow
def test_a_clip_outlives_a_server_that_is_killed(clips: Path) -> None:
    with short_folder() as folder:
        with serve(clips, folder) as first:
            clip_id = begin_clip(first)
            first.kill()
        with serve(clips, folder) as second, client_of(second.wait_for(SERVING)) as http:
            undisturbed = str(http.post("/v1/videos", json=CLIP).raise_for_status().json()["id"])
            assert undisturbed != clip_id
            assert finish(http, clip_id) == finish(http, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["ray::ServeController", "raylet"])
def test_a_server_ends_while_a_process_hangs(clips: Path, victim: str) -> None:
    with short_folder() as folder, serve(clips, folder) as server:
        server.wait_for(SERVING)
        (hanging,) = (process for process in started_by(server) if name_of(process).startswith(victim))
        hanging.suspend()
        server.terminate()
        code = server.wait()
        assert not name_of(hanging)
    assert code == 143 or victim == "raylet", "without its raylet, Ray itself ends the process"


def name_of(process: psutil.Process) -> str:
    """Return the title without folders; empty if the process has ended."""
    return (cmdline(process) or [""])[0].rpartition("/")[2].strip()


def test_a_clip_beside_proxies(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROUPE_API_KEY", KEY)
    for name, value in PROXIES.items():
        monkeypatch.setenv(name, value)
    out = tmp_path / "clip.mp4"
    wanted = ("--steps", "3", "--seed", "7", "--out", str(out))
    result = troupe("generate", "a red circle", *wanted, "--url", url)
    assert result.exit_code == 0, result.output
    assert f"{out}  seed 7" in result.output
    with av.open(str(out)) as container:
        assert container.streams.video[0].codec_context.name == "h264"
        assert sum(1 for _ in container.decode(video=0)) == 9


def test_without_a_key_it_is_one_line(url: str, tmp_path: Path) -> None:
    out = tmp_path / "clip.mp4"
    assert_one_line(troupe("generate", "a red circle", "--out", str(out), "--url", url), "key")
    assert not out.exists()


def test_each_request_is_a_line_on_its_console(server: Command, url: str) -> None:
    with client_of(url) as http:
        http.get("/v1/models", headers={"X-Request-Id": "asked-here"}).raise_for_status()
    server.wait_for(r"\d\d:\d\d:\d\d 200 GET /v1/models \d+ ms asked-here")
    logs = Path(server.wait_for(r"(?<=Logs of its processes: ).+"))
    assert any("asked-here" in text for text in log_texts(logs).values())


def test_it_is_found_and_looked_at(server: Command, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logs = Path(server.wait_for(r"(?<=Logs of its processes: ).+"))
    folder = next(parent for parent in logs.parents if parent.name.startswith("troupe_"))
    monkeypatch.setenv("TROUPE_DATA_DIR", str(folder / "data"))
    monkeypatch.setenv("TROUPE_API_KEY", KEY)
    for name, value in PROXIES.items():
        monkeypatch.setenv(name, value)
    row, seen = r"│ clips +│ video +│ 1 +│ 0 +│ 0 +│ ready", list[Result]()

    def is_shown() -> bool:
        """Return whether the table has the row: it lacks it if the gang did not report in time."""
        seen.append(troupe("status"))
        return re.search(row, seen[-1].output) is not None

    wait_until(is_shown, row)
    assert seen[-1].exit_code == 0, seen[-1].output
    assert f"{url} is ready" in seen[-1].output
    assert "clips" in troupe("clips").output
    assert re.search(r"clips +│", troupe("models", "--url", url).output)
    assert f"Metrics: http://127.0.0.1:{METRICS_PORT}/metrics" in server.output


def test_other_users_of_the_machine_see_nothing(server: Command) -> None:
    logs = Path(server.wait_for(r"(?<=Logs of its processes: ).+"))
    own, folder = logs.parents[2], logs.parents[3]
    assert (own.parent, own.stat().st_mode & 0o777) == (folder, 0o700)
    data = folder / "data"
    assert data.stat().st_mode & 0o777 == 0o700
    kept = [data / "jobs.sqlite3", *(path for name in ("videos", "servers") for path in paths_in(data / name))]
    open_to_others: list[Path] = []
    for path in kept:
        with suppress(FileNotFoundError):  # the server writes, renames and deletes files meanwhile
            open_to_others += [path] if path.stat().st_mode & 0o077 else []
    assert open_to_others == []


def started_by(server: Command) -> list[psutil.Process]:
    """Return all processes that the server has started, including those without files in its folder."""
    (root,) = (process for process in server.processes() if of_living(process.ppid, 0) == os.getpid())
    return list(root.children(recursive=True))


def test_it_listens_where_the_table_says(server: Command, url: str) -> None:
    assert httpx.get(f"{url}/health", timeout=TIMEOUT_S).status_code == 200
    started = started_by(server)
    assert list(differences(listening(started), rows(ONE_MACHINE))) == []
    (door,) = (process for process in started if of_living(process.name, "") == "haproxy")
    at_the_door = {one.laddr for one in door.net_connections("tcp") if one.status == psutil.CONN_LISTEN}
    assert at_the_door == {("127.0.0.1", httpx.URL(url).port)}


def test_other_users_reach_no_socket_in_the_file_system(server: Command) -> None:
    sockets = (of_living(partial(process.net_connections, "unix"), []) for process in started_by(server))
    unix = {one.laddr for each in sockets for one in each if one.laddr}
    folders = [Path(address).parents for address in unix if address.startswith("/")]
    assert len(folders) > 1
    assert [str(each[0]) for each in folders if not any(folder.stat().st_mode & 0o077 == 0 for folder in each)] == []
