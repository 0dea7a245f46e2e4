"""The token that every process of a cluster on this machine shows to the others, readable by its owner alone."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from deployments.places import close_to_others

MODE, TOKEN, FILE = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
"""Ray 2.60 reads them in this order."""


def token_problem(variables: Mapping[str, str]) -> str | None:
    """Return why the token that ``variables`` name cannot be used, and what to change; None if it can."""
    path = variables.get(FILE)
    if not _is_wanted(variables) or variables.get(TOKEN) or not path:
        return None
    try:
        reason = "" if Path(path).read_text().strip() else "it is empty"
    except (OSError, UnicodeDecodeError) as error:
        reason = (os.strerror(error.errno or 0) if isinstance(error, OSError) else "it is no text").lower()
    if not reason:
        return None
    return f"{FILE} names {path}, which holds no token ({reason}): write one (`openssl rand -hex 32`), or unset it"


def token_variables(variables: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return what to set beside ``variables`` so that Ray finds a token; make one if there is none.

    It is the user's in ``~/.ray``, as Ray has it, which is closed to others here; where that cannot be written, one in
    ``folder``.
    """
    if not _is_wanted(variables) or variables.get(TOKEN) or variables.get(FILE):
        return {}
    try:
        file = Path.home() / ".ray" / "auth_token"
        if _has_token(file):
            close_to_others(file, 0o600)
            return {}
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(file)
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        file = folder / "auth_token"
        _write(file)
        return {FILE: str(file)}
    return {}


def token_files(variables: Mapping[str, str]) -> list[Path]:
    """Return the file that holds the token, if one is there."""
    if not _is_wanted(variables) or variables.get(TOKEN):
        return []
    try:
        file = Path(variables.get(FILE) or Path.home() / ".ray" / "auth_token")
    except RuntimeError:  # there is no home
        return []
    return [file] if os.path.isfile(file) else []


def _is_wanted(variables: Mapping[str, str]) -> bool:
    return variables.get(MODE, "token").lower() == "token"


def _has_token(file: Path) -> bool:
    try:
        return bool(file.read_bytes().strip())
    except FileNotFoundError:
        return False


def _write(file: Path) -> None:
    with open(os.open(file, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as opened:
        opened.write(_new_token())


@cache
def _new_token() -> str:
    """The same for a process's life: Ray reads it once, and a process may start several clusters."""
    return secrets.token_hex(32)
