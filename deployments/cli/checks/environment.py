"""What the environment does not allow, said before anything starts: places that cannot be written, unreadable keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from deployments.cli.local.folder import folder_problem
from deployments.cli.local.token import token_files, token_problem
from deployments.clips.settings import DATABASE
from deployments.config import ServeConfig
from deployments.door.door import FOLDER as DOOR_FOLDER
from deployments.places import file_refusal, is_open_to_others, refusal
from deployments.settings import Settings, process_environment

KEPT = ("videos", "files", "answers", "servers")
"""Folders in the data directory that must be writable, and are closed to others."""


def environment_problems(config: ServeConfig) -> Iterator[str]:
    """Yield what keeps any server from running here and what to change, a sentence each."""
    try:
        settings = Settings()
    except ValueError as error:
        yield str(error)
        return
    try:
        settings.key_ring()
    except (OSError, ValueError) as error:
        yield f"the API keys cannot be read: {error}"
    folder, given_by = data_directory(config, settings)
    if reason := _refusal(folder, has_database=not settings.database_url):
        yield f"{reason}; clips and pictures are kept there: let this user write, or set {given_by} to another folder"
    if reason := refusal(DOOR_FOLDER):
        yield f"{reason}; HAProxy's files lie there: let this user write"
    variables = process_environment()
    yield from filter(None, (folder_problem(variables), token_problem(variables)))


def data_directory(config: ServeConfig, settings: Settings) -> tuple[Path, str]:
    """Return where clips and pictures are kept, and what says so."""
    own = config.app.api.data_dir
    return (settings.data_dir.absolute(), "TROUPE_DATA_DIR") if own is None else (own.absolute(), "api.data_dir")


def open_to_others() -> list[Path]:
    """Return what other users of this machine can read, and should not: clips, pictures, records, Ray's token."""
    settings = Settings()
    names = [*KEPT, *(f"{DATABASE}{ending}" for ending in ("", "-wal", "-shm"))]
    paths = [settings.data_dir / name for name in names if is_open_to_others(settings.data_dir)]
    return [path for path in (*paths, *token_files(process_environment())) if is_open_to_others(path)]


def _refusal(folder: Path, *, has_database: bool) -> str | None:
    files = [folder / DATABASE] if has_database and (folder / DATABASE).is_file() else []
    folders = [folder, *(path for name in KEPT if (path := folder / name).is_dir())]
    reasons = [*(refusal(one) for one in folders), *(file_refusal(one) for one in files)]
    return next(filter(None, reasons), None)
