"""The console has a line for each request."""

from __future__ import annotations

import asyncio
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from deployments.cli.request_lines import Follower, LogFormat, format_line, show_requests
from deployments.observability.logs import configure_logs
from tests.deployments.http.conftest import build, client_of
from tests.deployments.support.fake_service import FakeService
from tests.deployments.support.live import wait_until

RECORD = {
    "time": "2026-11-22T10:41:07.123456+00:00",
    "level": "info",
    "request_id": "mine-1",
    "logger": "troupe.access",
    "message": "GET /v1/models 200",
    "method": "GET",
    "path": "/v1/models",
    "status": 200,
    "duration_ms": 3.4,
    "client": "127.0.0.1",
}


def line(**fields: Any) -> str:
    return json.dumps(RECORD | fields)


def test_a_plain_line_says_what_was_asked_and_how_it_went() -> None:
    assert format_line(line(), LogFormat.plain) == "10:41:07 200 GET /v1/models 3 ms mine-1"


def test_a_path_is_no_command_to_the_terminal() -> None:
    assert "/\\x1b[31m\\n\\xe9 " in format_line(line(path="/\x1b[31m\né"), LogFormat.plain)


def test_a_json_line_is_the_log_s_own() -> None:
    assert format_line(line(), LogFormat.json) == line()


def test_health_is_told_when_it_is_bad() -> None:
    for log_format in LogFormat:
        assert format_line(line(path="/health"), log_format) == ""
        assert format_line(line(path="/health", status=503), log_format) != ""


def test_lines_are_taken_whole_and_once(tmp_path: Path) -> None:
    old, other = tmp_path / "worker-1.err", tmp_path / "worker-1.out"
    old.write_text(f"{line(path='/before')}\n")
    follower = Follower(tmp_path)
    assert list(follower.new_lines()) == []
    with old.open("a") as log:
        log.write(f"{line(path='/a')}\nsomething else\n{line(path='/b')[:20]}")
    other.write_text(f"{line(path='/elsewhere')}\n")
    assert list(follower.new_lines()) == [line(path="/a")]
    with old.open("a") as log:
        log.write(f"{line(path='/b')[20:]}\n")
    (tmp_path / "worker-2.err").write_text(f"{line(path='/c')}\n")
    assert list(follower.new_lines()) == [line(path="/b"), line(path="/c")]
    assert list(follower.new_lines()) == []
    old.write_text(f"{line(path='/d')}\n")
    assert list(follower.new_lines()) == [line(path="/d")]


@pytest.mark.parametrize("backup", ["worker-1.{}.err", "worker-1.err.{}"])
def test_nothing_is_lost_nor_told_twice_as_logs_are_put_away(tmp_path: Path, backup: str) -> None:
    """Logs of two lines rotate with two backups, named as Ray and Python's logging do."""
    log, backups = tmp_path / "worker-1.err", [tmp_path / backup.format(number) for number in (1, 2)]
    follower, told, written = Follower(tmp_path), list[str](), list[str]()
    for number in range(40):
        if number % 2 == 0 and log.exists():
            if backups[0].exists():
                backups[0].replace(backups[1])
            log.replace(backups[0])
        written.append(line(path=f"/{number}"))
        with log.open("a") as file:
            file.write(f"{written[-1]}\n")
        if number % 3 == 2:
            told += follower.new_lines()
    assert told + list(follower.new_lines()) == written


def test_a_log_that_is_put_away_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "worker-1.err"
    follower = Follower(tmp_path)
    monkeypatch.setattr(follower, "_files", lambda: [tmp_path / "worker-0.err", log])
    log.write_text(f"{line(path='/a')}\n")
    assert list(follower.new_lines()) == [line(path="/a")]


async def test_what_the_api_logs_is_shown(tmp_path: Path) -> None:
    """The line has the form of a replica's log."""
    stream, shown = io.StringIO(), list[str]()
    show_requests(tmp_path, LogFormat.plain, shown.append)
    configure_logs(stream)
    try:
        async with client_of(build(FakeService(), tmp_path / "data")) as client:
            await client.get("/v1/models", headers={"X-Request-Id": "mine-1"})
            await client.get("/nowhere")
    finally:
        configure_logs()
    (tmp_path / "worker-1.err").write_text(stream.getvalue())
    await asyncio.to_thread(wait_until, lambda: len(shown) == 2, "both lines")
    assert re.fullmatch(r"[\d:]{8} 200 GET /v1/models \d+ ms mine-1", shown[0])
    assert re.fullmatch(r"[\d:]{8} 404 GET /nowhere \d+ ms req_\w+", shown[1])
