"""Checks of a process's only NCCL, and links by which TensorRT finds it: torch's, under both of its names."""

from __future__ import annotations

import ctypes
import importlib.metadata
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

logger = logging.getLogger("troupe.tensorrt")

VERSIONED, PLAIN = "libnccl.so.2", "libnccl.so"
MIN_VERSION, END_VERSION = (2, 19), (3, 0)
LINKS = Path.home() / ".cache" / "troupe" / "nccl"
_WHEELS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")


class NcclError(RuntimeError):
    """TensorRT cannot use this process's NCCL. The message says what was found and what to change."""


def loaded_libraries(maps: Path = Path("/proc/self/maps")) -> tuple[Path, ...]:
    """Return the resolved paths of the NCCL libraries mapped into this process."""
    paths = {line.split(maxsplit=5)[-1].strip() for line in maps.read_text().splitlines() if "libnccl" in line}
    return tuple(sorted({Path(path).resolve() for path in paths if Path(path).name.startswith(PLAIN)}))


def library_version(path: Path) -> tuple[int, int, int]:
    """Return the library's own (major, minor, patch)."""
    code = ctypes.c_int()
    if ctypes.CDLL(str(path)).ncclGetVersion(ctypes.byref(code)):
        raise NcclError(f"{path} does not report its version")
    return decode_version(code.value)


def decode_version(code: int) -> tuple[int, int, int]:
    """Decode NCCL's version number: 22809 is 2.28.9; 2708, from before 2.9, is 2.7.8."""
    return (
        (code // 10000, code // 100 % 100, code % 100)
        if code >= 10000
        else (code // 1000, code // 100 % 10, code % 100)
    )


def check_loaded(libraries: tuple[Path, ...], versions: Mapping[Path, tuple[int, int, int]]) -> None:
    """Raise NcclError unless there is exactly one NCCL, of a version that TensorRT supports."""
    if len(libraries) != 1:
        shown = ", ".join(map(str, libraries)) or "none"
        raise NcclError(
            f"the process must load one NCCL, torch's; found {shown}: take other copies off LD_LIBRARY_PATH"
        )
    version = versions[libraries[0]]
    if not MIN_VERSION <= version[:2] < END_VERSION:
        supported = f">= {MIN_VERSION[0]}.{MIN_VERSION[1]}, < {END_VERSION[0]}"
        raise NcclError(f"TensorRT needs NCCL {supported}; {libraries[0]} is {'.'.join(map(str, version))}")


def check_process() -> Path:
    """Return the path of this process's NCCL. NcclError if TensorRT cannot use it."""
    libraries = loaded_libraries()
    check_loaded(libraries, {path: library_version(path) for path in libraries})
    return libraries[0]


def search(folders: Iterable[Path]) -> dict[str, Path]:
    """Return the first file of each name in ``folders``, by TensorRT's search order."""
    libraries: dict[str, Path] = {}
    for folder in folders:
        for name in (VERSIONED, PLAIN):
            if name not in libraries and (folder / name).exists():
                libraries[name] = folder / name
    return libraries


def library_path(environment: Mapping[str, str]) -> tuple[Path, ...]:
    return tuple(Path(folder) for folder in environment.get("LD_LIBRARY_PATH", "").split(":") if folder)


def wheel_folder() -> Path | None:
    """Return the folder of pip's NCCL wheel; None if it is not installed."""
    for name in _WHEELS:
        try:
            files = importlib.metadata.files(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name == VERSIONED:
                return Path(str(file.locate())).parent
    return None


def rank_environment(environment: Mapping[str, str], link_folder: Path = LINKS) -> dict[str, str]:
    """Return changes of ``environment`` for a new rank, so that TensorRT finds torch's NCCL; empty if it already does.

    TensorRT looks for both names, but pip ships ``libnccl.so.2`` only. Links of both names are made in ``link_folder``.
    The loader reads LD_LIBRARY_PATH once: changes have no effect in a running process.
    """
    libraries = search(library_path(environment))
    if VERSIONED in libraries and PLAIN in libraries:
        return {}
    library = libraries.get(VERSIONED) or _wheel_library()
    missing = " and ".join(name for name in (VERSIONED, PLAIN) if name not in libraries)
    logger.warning(
        "no %s on LD_LIBRARY_PATH, where TensorRT looks: ranks get %s, linked in %s", missing, library, link_folder
    )
    link_folder.mkdir(parents=True, exist_ok=True)
    for name in (VERSIONED, PLAIN):
        _link(link_folder / name, library.resolve())
    rest = environment.get("LD_LIBRARY_PATH", "")
    return {"LD_LIBRARY_PATH": f"{link_folder}:{rest}" if rest else str(link_folder)}


def _wheel_library() -> Path:
    folder = wheel_folder()
    if folder is None:
        wheels = " or ".join(_WHEELS)
        raise NcclError(f"no {VERSIONED} on LD_LIBRARY_PATH nor in pip's {wheels}: pip install '.[gpu]'")
    return folder / VERSIONED


def _link(link: Path, target: Path) -> None:
    if link.is_symlink() and link.resolve() == target:
        return
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(link)
