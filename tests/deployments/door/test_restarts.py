"""The real HAProxy ends and another one replaces it, and none is left at the end."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from deployments import heartbeat
from deployments.door import door as doors
from deployments.door.door import SHORT_LIFE_S
from deployments.door.haproxy import find_binary
from deployments.places import OwnedFolder
from deployments.settings import process_environment
from deployments.worker_shim import STOPPED
from tests.deployments.door.support import Backend, assert_error, doored, served
from tests.deployments.support.live import wait_until
from tests.support.patience import PATIENCE_S


def test_it_is_started_again_and_ends_with_its_owner(backend: Backend) -> None:
    with served(backend) as address, doored(address) as (door, client):
        first = door.pid
        os.kill(first, signal.SIGKILL)
        assert client.get("/").status_code == 200, "the socket stayed open meanwhile"
        wait_until(lambda: door.pid != first, "another process")
        last = door.pid
    assert not psutil.pid_exists(last)


def test_one_that_is_stopped_is_replaced_and_does_not_hold_up_the_end(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "EVERY_S", 0.1)
    monkeypatch.setattr(doors, "ANSWER_WITHIN_S", 0.5)
    monkeypatch.setattr(doors, "END_WITHIN_S", 0.5)
    with served(backend) as address, doored(address) as (door, client):
        first = door.pid
        os.kill(first, signal.SIGSTOP)
        wait_until(lambda: door.pid != first, "another process")
        assert client.get("/").status_code == 200
        monkeypatch.setattr(doors.Door, "_answers", lambda door: True)
        os.kill(door.pid, signal.SIGSTOP)
        last = door.pid
    assert not psutil.pid_exists(last)


def test_one_that_is_stopped_is_not_asked_before_it_is_replaced(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped process would take as long to answer as a busy one may."""
    monkeypatch.setattr(heartbeat, "EVERY_S", 0.1)
    monkeypatch.setattr(doors, "ANSWER_WITHIN_S", 10 * PATIENCE_S)
    with served(backend) as address, doored(address) as (door, client):
        first = door.pid
        assert client.get("/").status_code == 200
        with monkeypatch.context() as patch:
            looks = Mock(return_value=True)
            patch.setattr(heartbeat.Heartbeat, "_is_alive", looks)
            wait_until(lambda: looks.called, "no question is under way")
            os.kill(first, signal.SIGSTOP)
        wait_until(lambda: door.pid != first, "another process")


def test_one_whose_cpu_time_is_limited_by_stops_is_not_replaced(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is stopped at every look, but runs between them."""
    num_looks = 0

    def look_at_a_stopped_one(pid: int) -> tuple[str, float]:
        nonlocal num_looks
        num_looks += 1
        return STOPPED, 0.01 * num_looks

    monkeypatch.setattr(heartbeat, "EVERY_S", 0.02)
    monkeypatch.setattr(doors, "state_of", look_at_a_stopped_one)
    with served(backend) as address, doored(address) as (_, client):
        wait_until(lambda: num_looks > 3 * heartbeat.MAX_MISSES, "it was looked at often")
        assert client.get("/").status_code == 200
    assert "does not answer and is ended" not in caplog.text


def test_a_process_that_cannot_start_is_not_started_all_the_time(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with served(backend) as address, doored(address) as (door, _):
        monkeypatch.setattr(door, "_binary", "false")
        pauses: list[float] = []

        def wait(pause_s: float) -> bool:
            pauses.append(pause_s)
            time.sleep(0.01)
            return False

        monkeypatch.setattr(door._closed, "wait", wait)
        os.kill(door.pid, signal.SIGKILL)
        wait_until(lambda: len(pauses) >= 3, "it was started several times")
    assert {*pauses} == {SHORT_LIFE_S}
    assert "HAProxy ended with exit code 1 and is restarted" in caplog.text


def test_one_whose_folder_was_cleaned_away_is_started_again(backend: Backend) -> None:
    with served(backend) as address, doored(address) as (door, client):
        wait_until(lambda: bool(door._ask("show info")), "it has made all its files in the folder")
        shutil.rmtree(door._wiring.folder)
        with suppress(ProcessLookupError):  # it may have ended with its folder
            os.kill(door.pid, signal.SIGKILL)
        assert client.get("/").status_code == 200


def test_where_none_can_be_started_that_is_tried_again(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start, failures = doors._new_folder, [OSError("there is no room")]

    def new_folder() -> OwnedFolder:
        if failures:
            raise failures.pop()
        return start()

    with served(backend) as address, doored(address) as (door, client):
        monkeypatch.setattr(doors, "_new_folder", new_folder)
        monkeypatch.setattr(doors, "SHORT_LIFE_S", 0.0)
        os.kill(door.pid, signal.SIGKILL)
        assert client.get("/").status_code == 200
    assert "there is no room" in caplog.text


def test_draining_while_none_is_there(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    drained = threading.Event()
    monkeypatch.setattr(doors, "SHORT_LIFE_S", PATIENCE_S)
    with served(backend) as address, doored(address) as (door, client):
        monkeypatch.setattr(door._closed, "wait", lambda pause_s: drained.wait(pause_s))
        os.kill(door.pid, signal.SIGKILL)
        wait_until(lambda: not psutil.pid_exists(door.pid), "there is none")
        door.drain()
        drained.set()
        assert_error(client.get("/"), 503, "server_unavailable")
    assert "/" not in backend.seen


def test_draining_while_one_starts(backend: Backend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    held, slow, asked = tmp_path / "held", tmp_path / "slow", threading.Event()
    slow.write_text(f'#!/bin/sh\nwhile [ -e {held} ]; do sleep 0.01; done\nexec {find_binary()} "$@"\n')
    slow.chmod(stat.S_IRWXU)
    monkeypatch.setattr(doors, "ADMIN_TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr(doors, "find_binary", lambda: str(slow))
    with served(backend) as address, doored(address) as (door, client):
        ask = door._ask

        def noted(command: str) -> str:
            answer = ask(command)
            asked.set()
            return answer

        monkeypatch.setattr(door, "_ask", noted)
        held.touch()
        first = door.pid
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: door.pid != first, "another process")
        draining = threading.Thread(target=door.drain)
        draining.start()
        assert asked.wait(PATIENCE_S)
        held.unlink()
        draining.join()
        assert_error(client.get("/"), 503, "server_unavailable")
    assert "/" not in backend.seen


def test_none_that_starts_as_the_door_closes_is_left(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    with served(backend) as address, doored(address) as (door, _):
        start, closing = door._start, threading.Thread(target=door.close)

        def start_and_close(*command: list[str]) -> subprocess.Popen[bytes]:
            process = start(*command)
            closing.start()
            assert door._closed.wait(PATIENCE_S)
            started.append(process)
            return process

        monkeypatch.setattr(door, "_start", start_and_close)
        os.kill(door.pid, signal.SIGKILL)
        wait_until(lambda: started, "another process")
        closing.join()
        assert started[0].poll() is not None


HOLDER = f"""
import sys
import time
from pathlib import Path
from deployments.door import door as doors
from deployments.door.door import Door, listen
from tests.deployments.door.support import SETTINGS
doors.FOLDER = Path(sys.argv[1])
door = Door(listen("127.0.0.1", 0), ("127.0.0.1", 9), SETTINGS)
print(door.pid, door._folder.path, flush=True)
time.sleep({PATIENCE_S})
"""


def test_the_folder_of_a_killed_server_goes_at_the_next_start(apart: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "FOLDER", apart)
    environment = {**process_environment(), "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", HOLDER, str(apart)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert holder.stdout is not None
    pid, name = holder.stdout.readline().split()
    try:
        with doored(("127.0.0.1", 9)):
            assert (Path(name) / "haproxy.cfg").is_file(), "its owner lives"
    finally:
        holder.kill()
        holder.communicate()
    wait_until(lambda: not psutil.pid_exists(int(pid)), "HAProxy ended with it")
    assert (Path(name) / "haproxy.cfg").is_file()
    with doored(("127.0.0.1", 9)):
        assert not Path(name).exists()
