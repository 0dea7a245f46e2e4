"""Databases to keep clips in: SQLite always, a PostgreSQL of our own where its programs are installed."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import create_async_engine

from deployments.clips.database import Base

# PostgreSQL refuses to run as root; its package comes with a user for it.
USER = "postgres" if os.getuid() == 0 else pwd.getpwuid(os.getuid()).pw_name


@pytest.fixture(scope="session")
def postgresql() -> Iterator[str]:
    """The URL of a server that listens on a socket in a folder of its own, and on no port."""
    if not program("pg_ctl") or importlib.util.find_spec("asyncpg") is None:
        pytest.skip("needs PostgreSQL's programs and asyncpg")
    folder = Path(tempfile.mkdtemp(prefix="troupe-pg-", dir="/tmp"))
    shutil.chown(folder, USER)
    data = folder / "data"
    options = f"-c listen_addresses='' -c unix_socket_directories={folder} -c fsync=off"
    run(program("initdb"), "-D", data, "-U", "troupe", "-A", "trust", "-E", "UTF8", "--no-sync")
    run(program("pg_ctl"), "-D", data, "-l", folder / "log", "-w", "-o", options, "start")
    try:
        yield f"postgresql+asyncpg://troupe@/postgres?host={folder}"
    finally:
        run(program("pg_ctl"), "-D", data, "-m", "immediate", "stop")
        shutil.rmtree(folder)


def program(name: str) -> str | None:
    """Debian keeps PostgreSQL's programs off the path, one folder a version."""
    newest = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))[-1:]
    return shutil.which(name) or next(map(str, newest), None)


def run(*command: object) -> None:
    # Not subprocess's own "user": it forks the whole process for that, which Linux refuses after tests of large models.
    user = ["runuser", "-u", USER, "--"] if os.getuid() == 0 else []
    words = user + [str(word) for word in command]
    subprocess.run(words, check=True, cwd="/", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What claims, and who deletes old clips, think the time is, in ``now_s``."""
    clock = SimpleNamespace(now_s=time.time())
    for module in ("store", "clips"):
        monkeypatch.setattr(f"deployments.clips.{module}.time", SimpleNamespace(time=lambda: clock.now_s))
    return clock


@pytest.fixture(params=["sqlite", "postgresql"])
async def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database."""
    if request.param == "sqlite":
        return f"sqlite+aiosqlite:///{tmp_path / 'sub' / 'jobs.sqlite3'}"
    url: str = request.getfixturevalue("postgresql")
    engine = create_async_engine(make_url(url))
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.drop_all)
    await engine.dispose()
    return url
