"""A worker that a fork of the zygote runs, as described by its shim."""

from __future__ import annotations

import json
import os
import random
import resource
import runpy
import signal
import site
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[1]
OWN_VARIABLES: Mapping[str, str] = {"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Otherwise BLAS starts threads at import, and counting GPUs initializes CUDA."""
READ_AT_START = (
    "COVERAGE_",
    "DIFFUSERS_",
    "GLIBC_",
    "HF_",
    "KMP_",
    "LD_",
    "MALLOC_",
    "MKL_",
    "OPENBLAS_",
    "PYTHON",
    "PYTORCH_",
    "TORCH",
    "TRANSFORMERS_",
    "TRITON_",
)
"""Prefixes of variables that are read at a process's start or at imports; a fork has the zygote's values."""
READ_LATER = frozenset({"PYTHONPATH", "PYTHONBREAKPOINT", "PYTHONUNBUFFERED", *OWN_VARIABLES})
MEASURED_BY = frozenset({"COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG", "COV_CORE_SOURCE"})
"""Variables that measure coverage from a process's start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForkedWorker:
    """The command of a worker, and the state of its shim's process, which the worker inherits."""

    command: Sequence[str]
    """A script, or ``-m`` and a module, with arguments."""
    environment: Mapping[str, str]
    """Variables of the shim."""
    folder: str
    """Working directory."""
    umask: int
    """Bits that new files do not get."""
    niceness: int
    """Priority of the scheduler, -20 to 19."""
    oom_score_adj: str
    """Content of ``/proc/self/oom_score_adj``."""
    limits: Mapping[str, tuple[int, int]]
    """Soft and hard limit by name (``RLIMIT_NOFILE``)."""
    blocked: Sequence[int]
    """Numbers of blocked signals."""
    ignored: Sequence[int]
    """Numbers of ignored signals."""
    streams: Sequence[int] = field(default=())
    """Descriptors of stdin, stdout and stderr."""

    @classmethod
    def parsed(cls, message: bytes, streams: Sequence[int]) -> Self:
        """Return the worker that a shim's message describes. ValueError or KeyError if the message is invalid."""
        fields: dict[str, Any] = json.loads(message)
        try:
            return cls(**fields, streams=tuple(streams))
        except TypeError as error:
            raise ValueError(str(error)) from error

    def refusal(self, environment: Mapping[str, str]) -> str:
        """Return why a fork of a zygote with ``environment`` cannot run this worker; empty if it can."""
        if measured := MEASURED_BY & self.environment.keys():
            return f"{min(measured)} is set, and coverage is measured from a process's start"
        different = sorted(
            name
            for name in {*self.environment, *environment} - READ_LATER
            if name.startswith(READ_AT_START) and self.environment.get(name) != environment.get(name)
        )
        if different:
            return f"it has its own {', '.join(different)}"
        if self.command[0].startswith("-") and self.command[0] != "-m":
            return f"its Python has the option {self.command[0]}"
        if self._project() not in (None, ROOT):
            return f"its project is {self._project()}, not {ROOT}"
        own = {name: resource.getrlimit(getattr(resource, name)) for name in self.limits}
        if os.getuid() and any(_hard(self.limits[name][1]) > _hard(own[name][1]) for name in own):
            return "it has higher limits"
        return ""

    def take_streams(self) -> None:
        """Replace this process's standard streams by ``streams``."""
        for target, stream in enumerate(self.streams):
            os.dup2(stream, target)

    def run(self, added: Mapping[str, str]) -> None:
        """Turn this fork of the zygote into the worker and run its command, once.

        ``added`` are variables that libraries set at import.
        """
        os.setsid()
        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update({**added, **self.environment})
        self._take_limits()
        self._take_signals()
        _seed_libraries(self.environment)
        if "PYTHONUNBUFFERED" in self.environment:
            sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        is_module = self.command[0] == "-m"
        script, arguments = self.command[is_module], self.command[is_module + 1 :]
        sys.path[:] = self._path()
        sys.argv[:] = [script, *arguments]
        if is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")

    def _take_limits(self) -> None:
        os.umask(self.umask)
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, self.niceness)
        with suppress(PermissionError):
            Path("/proc/self/oom_score_adj").write_text(self.oom_score_adj)
        for name, (soft, hard) in self.limits.items():
            resource.setrlimit(getattr(resource, name), (soft, hard))

    def _take_signals(self) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in self.ignored:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)

    def _path(self) -> list[str]:
        """Return the ``sys.path`` of a new interpreter."""
        first = self.folder if self.command[0] == "-m" else str(Path(self.command[0]).resolve().parent)
        own = self.environment.get("PYTHONPATH", "").split(os.pathsep)
        return list(dict.fromkeys([first, *filter(None, own), *_BASE_PATH]))

    def _project(self) -> Path | None:
        """Return the folder from which a new interpreter would import this project; None if it cannot."""
        roots = (Path(entry) for entry in self._path())
        found = next((root for root in roots if (root / "deployments" / "zygote.py").is_file()), None)
        return found.resolve() if found else _EDITABLE


def _base_path() -> tuple[str, ...]:
    """Return ``sys.path`` as it is without PYTHONPATH.

    Folders of installed packages stay, last as usual. An installed project is in one of them, which the zygote has in
    its PYTHONPATH.
    """
    added = {os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry}
    base = [entry for entry in sys.path if entry and os.path.abspath(entry) not in added]
    packages = (site.getusersitepackages(), *site.getsitepackages())
    return (*base, *(entry for entry in packages if entry in sys.path and os.path.abspath(entry) in added))


def _editable_root() -> Path | None:
    """Return the folder of an editable installation of this project, which has no entry in ``sys.path``."""
    finders = (finder for finder in sys.meta_path if finder not in (PathFinder, BuiltinImporter, FrozenImporter))
    specs = (finder.find_spec("deployments", None) for finder in finders)
    return next((Path(spec.origin).resolve().parents[1] for spec in specs if spec and spec.origin), None)


_BASE_PATH, _EDITABLE = _base_path(), _editable_root()


def _hard(limit: int) -> float:
    return float("inf") if limit == resource.RLIM_INFINITY else limit


def _seed_libraries(environment: Mapping[str, str]) -> None:
    """Seed random generators as in a new process, and set torch's threads from the environment."""
    random.seed()
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.random.seed()
    if torch is not None and environment.get("OMP_NUM_THREADS", "").isdecimal():
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
