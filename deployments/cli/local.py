"""Preparation of this machine before Ray starts: a folder, a token, and proxy variables."""

from __future__ import annotations

import ipaddress
import logging
import os
import secrets
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx

from deployments.places import OwnedFolder, close_to_others, refusal
from deployments.settings import process_environment, variables_set

PREFIX, RAYS = "tr_", "r"
"""Short names, for the paths of sockets. Ray opens its folder to all users, so it is in a private one."""
MAX_SOCKET_BYTES = 107
"""Limit of a socket's path (``sun_path`` in unix(7))."""
RANDOM_CHARS = 8
"""Characters that ``mkdtemp`` adds to a prefix."""
SCHEMES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
READ_BY_CLIENTS = ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "ssl_cert_file", "ssl_cert_dir")
OWN_NAMES = ("localhost", "127.0.0.1", "::1")
MODE, TOKEN, FILE = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
"""Ray 2.60 reads them in this order."""

logger = logging.getLogger("troupe.serving")


@contextmanager
def own_folder(variables: Mapping[str, str]) -> Iterator[Path]:
    """Yield a new folder for one cluster, below the environment's temporary folder.

    It is deleted at the end; after a failure it stays, with its logs, until the next cluster starts.
    """
    _, base = base_folder(variables)
    base.mkdir(parents=True, exist_ok=True)
    folder = OwnedFolder.make(base, PREFIX)
    try:
        yield folder.path
    except Exception:
        logger.warning("logs of the failed cluster are in %s until the next start", folder.path)
        folder.release()
        raise
    except BaseException:
        folder.delete()
        raise
    folder.delete()


def base_folder(variables: Mapping[str, str]) -> tuple[str, Path]:
    """Return the variable that names the folder of Ray's temporary files (empty: the default), and that folder."""
    for name in ("RAY_TMPDIR", "TMPDIR"):
        if value := variables.get(name):
            return name, Path(value).absolute()
    return "", Path("/tmp")


def folder_problem(variables: Mapping[str, str]) -> str | None:
    """Return why a cluster cannot use the folder of ``variables``, and what to change; None if it can."""
    name, base = base_folder(variables)
    named = f"{name} is {base}" if name else str(base)
    too_long = len(os.fsencode(_longest_socket(base))) - MAX_SOCKET_BYTES
    if too_long > 0:
        return (
            f"{named}, which is {too_long} bytes too long: it has Ray's sockets, whose paths have at most "
            f"{MAX_SOCKET_BYTES} bytes; set RAY_TMPDIR to a shorter folder, such as /tmp"
        )
    if reason := refusal(base):
        return f"{named}, for Ray's files: {reason}; set RAY_TMPDIR to a short path that can be written"
    return None


def _longest_socket(base: Path) -> Path:
    session = f"session_2026-01-01_00-00-00_000000_{os.getpid()}"
    return base / f"{PREFIX}{'x' * RANDOM_CHARS}" / RAYS / session / "sockets" / "plasma_store"


def http_client(url: str, **options: Any) -> httpx.Client:
    """Return a client for requests to ``url``, which uses the environment's proxies unless this is its host.

    ValueError names the variable that cannot be used.
    """
    if not uses_proxies(url):
        return httpx.Client(trust_env=False, **options)
    try:
        return httpx.Client(**options)
    except Exception as error:
        if problem := client_problem():
            raise ValueError(f"{url} cannot be reached: {problem}") from error
        raise


def uses_proxies(url: str) -> bool:
    """Return whether requests to ``url`` may use the environment's proxies: httpx's ``trust_env``."""
    return not is_own(httpx.URL(url).host)


def is_own(host: str) -> bool:
    """Return whether ``host``, a name or an address, is this machine, without a name server."""
    if host == "localhost" or host.endswith(".localhost") or host == socket.gethostname():
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    if address.is_loopback or address.is_unspecified:
        return True
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, 0))  # the kernel knows its own addresses
        except OSError:
            return False
    return True


def client_problem() -> str | None:
    """Return the variable that httpx cannot use, and why; None if there is none."""
    named = [name for name in process_environment() if name.lower() in READ_BY_CLIENTS]
    for name in named:
        with variables_set(dict.fromkeys(set(named) - {name})):
            try:
                httpx.Client().close()
            except Exception as error:
                return f"the variable {name} cannot be used: {error}"  # its value may hold a password
    return None


def exceptions_for(hosts: Iterable[str], variables: Mapping[str, str]) -> dict[str, str]:
    """Return additional variables with which processes reach ``hosts`` and this machine without a proxy.

    gRPC reads ``no_grpc_proxy`` before ``no_proxy``, in lower case only (its documentation of environment variables).
    """
    lower = {name.lower(): value for name, value in sorted(variables.items()) if value}  # lower case comes last
    if not any(name in lower for name in SCHEMES):
        return {}
    excepted = lower.get("no_proxy", "")
    values = {"no_grpc_proxy": lower.get("no_grpc_proxy", excepted)}
    if "*" not in excepted:  # in a list, some libraries do not read it as all hosts
        values["no_proxy"] = excepted
    return {name: ",".join(dict.fromkeys([*_entries(value), *OWN_NAMES, *hosts])) for name, value in values.items()}


def _entries(value: str) -> list[str]:
    return [entry for part in value.split(",") if (entry := part.strip())]


def token_problem(variables: Mapping[str, str]) -> str | None:
    """Return why the token file of ``variables`` cannot be used, and what to change; None if it can."""
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
    """Return additional variables with which Ray finds a token; create one if there is none.

    The token is Ray's default file in ``~/.ray``, made private, or one in ``folder`` if that cannot be written.
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
    except (OSError, RuntimeError):  # RuntimeError: no home folder
        file = folder / "auth_token"
        _write(file)
        return {FILE: str(file)}
    return {}


def token_files(variables: Mapping[str, str]) -> list[Path]:
    """Return the existing file with the token, if any."""
    if not _is_wanted(variables) or variables.get(TOKEN):
        return []
    try:
        file = Path(variables.get(FILE) or Path.home() / ".ray" / "auth_token")
    except RuntimeError:  # no home folder
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
    """Return this process's token: Ray reads it once, and a process may start several clusters."""
    return secrets.token_hex(32)
