"""Forked workers: a fork's own state, its end, and a fallback without a fork."""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import shutil
import signal
import site
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from deployments import forked_worker, forked_workers, worker_shim
from deployments.forked_worker import ROOT
from deployments.forked_workers import SHIM, forking_cluster
from deployments.settings import process_environment
from deployments.worker_shim import DIRECTORY_VARIABLE, WARM, level_of, node_folder
from deployments.zygote import LIBRARIES, keep_bytecode, libraries_of
from tests.deployments.support.live import wait_until
from tests.support.patience import PATIENCE_S
from tests.support.processes import cmdline

TELL = """
import json, os, random, resource, signal, sys
told = {
    "pid": os.getpid(), "parent": os.getppid(), "argv": sys.argv[1:], "folder": os.getcwd(), "umask": os.umask(0),
    "niceness": os.nice(0), "files": resource.getrlimit(resource.RLIMIT_NOFILE), "own": os.environ.get("OWN"),
    "oom": open("/proc/self/oom_score_adj").read().strip(), "path": sys.path, "main": __name__,
    "libraries": sorted({"torch", "diffusers", "uvicorn", "ray"} & set(sys.modules)), "session": os.getsid(0),
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())), "chance": random.random(),
    "tasks": os.listdir("/proc/self/task"),
}
if "numpy" in sys.modules:
    import numpy
    told["numpy"] = numpy.random.random()
print(json.dumps(told))
"""

NO_PID = "99999999"
"""Above the maximum of process ids (``PID_MAX_LIMIT`` of Linux)."""


@pytest.fixture(scope="module")
def directory() -> Iterator[str]:
    with forking_cluster():
        yield process_environment()[DIRECTORY_VARIABLE]


def begin(code: str, *arguments: str, level: str = "base", **options: object) -> subprocess.Popen[str]:
    """Start ``code`` by a shim, whose pid is that of the returned process."""
    script = Path(process_environment()[DIRECTORY_VARIABLE]) / f"{abs(hash(code))}.py"
    script.write_text(code)
    command = [sys.executable, "-I", "-S", str(SHIM), level, str(script), *arguments]
    pipes: dict[str, object] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **{**pipes, **options})  # type: ignore[call-overload,no-any-return]


def end_of(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err


def answer_of(process: subprocess.Popen[str]) -> dict[str, object]:
    status, out, err = end_of(process)
    assert status == 0, err
    answer: dict[str, object] = json.loads(out)
    return answer | {"said": err}


def zygotes(directory: str) -> list[psutil.Process]:
    """Return the zygotes of both levels: the first and its fork."""
    (first,) = [one for one in psutil.Process().children() if directory in cmdline(one)]
    return [first, *(one for one in first.children() if directory in cmdline(one))]


def with_environment(**variables: str) -> Mapping[str, str]:
    return {**process_environment(), **variables}


def test_a_fork_has_its_libraries_and_everything_else_of_its_own(directory: str, tmp_path: Path) -> None:
    def prepare() -> None:
        os.umask(0o027)
        os.nice(3)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 100, hard))
        Path("/proc/self/oom_score_adj").write_text("321")
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})

    (tmp_path / "library").mkdir()
    environment = with_environment(OWN="yes", PYTHONPATH=str(tmp_path / "library"), OMP_NUM_THREADS="1")
    options: dict[str, Any] = {"cwd": tmp_path, "env": environment, "preexec_fn": prepare}
    answer = answer_of(begin(TELL, "one", "two words", **options))
    assert answer["parent"] == zygotes(directory)[0].pid, answer["said"]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    expected = {
        "argv": ["one", "two words"],
        "folder": str(tmp_path),
        "umask": 0o027,
        "niceness": min(os.nice(0) + 3, 19),
        "files": [soft - 100, hard],
        "own": "yes",
        "oom": "321",
        "main": "__main__",
        "libraries": ["uvicorn"],
        "blocked": [signal.SIGINT],
        "session": answer["pid"],
    }
    assert {name: answer[name] for name in expected} == expected
    path = answer["path"]
    assert isinstance(path, list)
    assert path[:2] == [directory, str(tmp_path / "library")]
    plain = subprocess.run([sys.executable, "-c", "import sys; print(sys.path[-1])"], capture_output=True, text=True)
    assert path[-1] == plain.stdout.strip(), "libraries where a new interpreter looks for them"


def test_a_model_s_worker_has_torch_in_one_thread_and_chance_of_its_own(directory: str) -> None:
    first, second = (answer_of(begin(TELL, level="model")) for _ in range(2))
    assert first["libraries"] == ["diffusers", "torch", "uvicorn"]
    assert first["parent"] == second["parent"] == zygotes(directory)[1].pid
    assert first["tasks"] == [str(first["pid"])], "nothing that survives no fork was started before it"
    assert first["chance"] != second["chance"]
    assert first["numpy"] != second["numpy"]


def test_zygotes_have_one_thread_each_and_neither_ray_nor_cuda(directory: str) -> None:
    answer_of(begin(TELL, level="model"))  # both are running
    for zygote in zygotes(directory):
        assert zygote.num_threads() == 1
        mapped = Path(f"/proc/{zygote.pid}/maps").read_text()
        assert "libcuda.so" not in mapped
        assert "_raylet.so" not in mapped


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("raise SystemExit(7)", 7),
        ("raise ValueError('lost')", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import faulthandler, ctypes; faulthandler.enable(); ctypes.string_at(0)", -signal.SIGSEGV),
        ("import atexit, os; atexit.register(print, 'at the end')", 0),
    ],
)
def test_a_shim_ends_as_its_worker_does(directory: str, code: str, status: int) -> None:
    ended, out, err = end_of(begin(code))
    assert ended == status
    assert ("lost" in err) == (status == 1)
    assert ("Segmentation fault" in err) == (status == -signal.SIGSEGV), "faulthandler reports it"
    assert out == ("at the end\n" if status == 0 else "")


@pytest.mark.parametrize(("is_compiled", "writes_none"), [(False, True), (True, True), (False, False)])
def test_forks_keep_bytecode_where_there_would_be_none(
    is_compiled: bool, writes_none: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = str(tmp_path / "elsewhere")
    monkeypatch.setattr(sys, "pycache_prefix", elsewhere)
    monkeypatch.setattr(sys, "dont_write_bytecode", writes_none)
    spec = importlib.util.find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    if is_compiled:
        cached = Path(importlib.util.cache_from_source(spec.origin))
        cached.parent.mkdir(parents=True)
        cached.touch()
    keep_bytecode(tmp_path)
    kept = not is_compiled and writes_none
    assert sys.pycache_prefix == (str(tmp_path / "bytecode") if kept else elsewhere)
    assert sys.dont_write_bytecode is (writes_none and not kept)


WAIT = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(42))
print(os.getpid(), flush=True)
while True:
    time.sleep(0.05)  # a signal just before one long sleep would be handled at its end
"""


def waiting_worker() -> tuple[subprocess.Popen[str], int]:
    shim = begin(WAIT)
    assert shim.stdout is not None
    return shim, int(shim.stdout.readline())


def test_signals_reach_the_worker(directory: str) -> None:
    shim, _ = waiting_worker()
    shim.send_signal(signal.SIGTERM)
    assert end_of(shim)[0] == 42


def test_a_worker_dies_with_its_shim(directory: str) -> None:
    shim, worker = waiting_worker()
    shim.kill()
    end_of(shim)
    wait_until(lambda: not psutil.pid_exists(worker), "the worker is gone")


def test_a_zygote_that_hears_of_the_ends_of_a_worker_and_its_shim_at_once_goes_on() -> None:
    code = (
        "import os, socket, deployments.zygote as z; z.IDLE_S = 0.0; listeners, (held, shim) = socket.socketpair(), "
        "socket.socketpair(); zygote = z.Zygote(listeners[0], None, {}); pid = os.posix_spawn('/bin/true', ['-'], {}); "
        "zygote._workers[pid] = held; zygote._selector.register(held, z.selectors.EVENT_READ, zygote._lose_shim); "
        "os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT); shim.close(); zygote.run(); assert held.fileno() == -1"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_worker_that_is_stopped_for_good_is_killed(is_stopped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sleeping worker is not killed."""
    monkeypatch.setattr(worker_shim, "WATCHED_EVERY_S", 0.01)
    monkeypatch.setattr(worker_shim, "STOPPED_FOR_S", 0.1)
    with subprocess.Popen(["sleep", "1" if not is_stopped else str(PATIENCE_S)]) as worker:
        process = os.pidfd_open(worker.pid)
        try:
            if is_stopped:
                worker.send_signal(signal.SIGSTOP)
            worker_shim.wait_for(process, worker.pid, process)
        finally:
            os.close(process)
    assert worker.returncode == (-signal.SIGKILL if is_stopped else 0)


def test_a_worker_whose_cpu_time_is_limited_by_stops_is_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped at every look, but runs between them."""
    monkeypatch.setattr(worker_shim, "WATCHED_EVERY_S", 0.1)
    monkeypatch.setattr(worker_shim, "STOPPED_FOR_S", 0.3)
    look = worker_shim.state_of
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as worker:
        process, num_looks = os.pidfd_open(worker.pid), 0

        def look_at_a_stopped_one(pid: int) -> tuple[str, float]:
            nonlocal num_looks
            num_looks += 1
            if num_looks == 10:
                worker.kill()
            before_s = look(pid)[1]
            worker.send_signal(signal.SIGCONT)
            wait_until(lambda: worker.poll() is not None or look(pid)[1] > before_s, "it has run")
            worker.send_signal(signal.SIGSTOP)
            wait_until(lambda: look(pid)[0] != "R", "it is stopped")
            return look(pid)

        monkeypatch.setattr(worker_shim, "state_of", look_at_a_stopped_one)
        worker_shim.wait_for(process, worker.pid, process)
        os.close(process)
    assert num_looks == 10


HANG = {
    "sleeps": "time.sleep(1000)",
    "spins": "\n    while True: pass",
    "is stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
}


@pytest.mark.parametrize("how", HANG)
def test_a_ray_worker_that_hangs_at_its_start_is_replaced(
    directory: str, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another fork has the same command: Ray waits for the same shim."""
    first = tmp_path / "first"
    worker = tmp_path / worker_shim.RAY_WORKER
    worker.write_text(
        "import os, pathlib, signal, sys, time\n"
        f"first = pathlib.Path({str(first)!r})\n"
        "if not first.exists():\n"
        "    first.write_text(str(os.getpid()))\n"
        f"    {HANG[how]}\n"
        "print('second', sys.argv[1])\n"
    )
    shim = tmp_path / "shim.py"
    limits = "WATCHED_EVERY_S, STOPPED_FOR_S, IDLE_FOR_S, BUSY_FOR_S = 0.1, 0.3, 0.5, 0.3"
    shim.write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom deployments import worker_shim\n"
        f"worker_shim.{limits.replace(', ', ', worker_shim.', 3)}\nworker_shim.main()\n"
    )
    command = [sys.executable, str(shim), "base", str(worker), "argument"]
    status, out, err = end_of(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    assert (status, out) == (0, "second argument\n"), err
    pid = int(first.read_text())
    assert f"process {pid} hung at its start and is replaced" in err
    assert not psutil.pid_exists(pid)


def test_a_ray_worker_that_has_connected_may_be_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value_s in {"WATCHED_EVERY_S": 0.01, "IDLE_FOR_S": 0.1}.items():
        monkeypatch.setattr(worker_shim, name, value_s)
    with subprocess.Popen(["sleep", "0.5"]) as process:
        descriptor = os.pidfd_open(process.pid)
        with monkeypatch.context() as patch:
            patch.setattr(worker_shim, "RAY_TITLE", b"sleep")
            assert not worker_shim.wait_for(descriptor, process.pid, descriptor, is_starting=True)
        os.close(descriptor)
    assert process.returncode == 0


def test_what_cannot_be_forked_runs_by_itself_and_says_why_once(directory: str) -> None:
    own: dict[str, Any] = {"env": with_environment(LD_LIBRARY_PATH="/somewhere/else")}
    (status, out, err), again = end_of(begin(TELL, "a", **own)), end_of(begin(TELL, "a", **own))
    assert status == again[0] == 0
    assert json.loads(out)["libraries"] == []
    assert json.loads(out)["argv"] == ["a"]
    assert "LD_LIBRARY_PATH" in err
    assert again[2] == ""
    measured = end_of(begin(TELL, env=with_environment(COVERAGE_PROCESS_START="/none")))
    assert json.loads(measured[1])["libraries"] == []


def test_another_copy_of_the_project_is_not_served(directory: str, tmp_path: Path) -> None:
    copy = tmp_path / "deployments"
    copy.mkdir()
    (copy / "zygote.py").touch()
    _, out, err = end_of(begin(TELL, env=with_environment(PYTHONPATH=str(tmp_path))))
    assert json.loads(out)["libraries"] == []
    assert str(tmp_path) in err


def test_libraries_beside_an_installed_project_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The zygote's PYTHONPATH begins with the project's folder; if the project is installed, it has all libraries."""
    (packages, *_), standard = site.getsitepackages(), sysconfig.get_path("stdlib")
    for root, expected in ((packages, [standard, packages]), ("/of/a/clone", [standard])):
        monkeypatch.setenv("PYTHONPATH", f"{root}:/own")
        monkeypatch.setattr(sys, "path", [root, "/own", standard])
        assert list(forked_worker._base_path()) == expected


def test_levels_are_known_by_the_shim_s_own_command() -> None:
    assert level_of("") == level_of(sys.executable) == "base"
    assert level_of(f"{sys.executable} -I -S {SHIM} model") == "model"
    assert level_of("/elsewhere/bin/python") is None
    assert level_of("conda run python") is None


def lone(code: str, environment: Mapping[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-I", "-S", str(SHIM), "base", "-c" if code.startswith("import") else code]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_the_first_shims_of_a_node_start_one_zygote_and_do_without_a_dead_one(tmp_path: Path) -> None:
    """A cluster's node is like this: no process starts the zygote before. Workers outlive it."""
    script = tmp_path / "wait.py"
    script.write_text(WAIT)
    environment = {name: value for name, value in process_environment().items() if name != DIRECTORY_VARIABLE}
    environment |= {"RAY_RAYLET_PID": f"{os.getpid()}0", "TMPDIR": f"/tmp/{'long' * 30}", "PYTHONPATH": str(ROOT)}
    ended, others, alive = (Path(node_folder(name)) for name in (NO_PID, "others", str(os.getpid())))
    for folder in (ended, others, alive):
        folder.mkdir(exist_ok=True)
    shims = [lone(str(script), environment) for _ in range(2)]
    workers = [psutil.Process(int(shim.stdout.readline())) for shim in shims if shim.stdout is not None]
    assert [folder.exists() for folder in (ended, others, alive)] == [False, True, True]
    others.rmdir()
    alive.rmdir()
    zygote = workers[0].parent()
    assert zygote is not None
    assert zygote.pid == workers[1].ppid()
    assert "deployments.zygote" in zygote.cmdline()
    (directory,) = Path("/tmp").glob(f"troupe_{os.getuid()}_{os.getpid()}0_*")
    assert directory.stat().st_mode & 0o777 == 0o700
    zygote.kill()
    wait_until(lambda: not zygote.is_running(), "the zygote is gone")
    assert all(worker.is_running() for worker in workers)
    for shim in shims:
        shim.send_signal(signal.SIGTERM)
    for shim in shims:
        end_of(shim)
    wait_until(lambda: not any(worker.is_running() for worker in workers), "signals reach them")
    shutil.rmtree(directory)


@pytest.fixture
def raylet() -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process with the environment of a raylet.

    Ray preloads an allocator for its raylets, and not for their workers.
    """
    environment = {name: value for name, value in process_environment().items() if name != DIRECTORY_VARIABLE}
    allocator = Path(ray.__file__).parent / "core" / "libjemalloc.so"
    environment |= {"LD_PRELOAD": str(allocator), "RAY_LD_PRELOAD_ON_WORKERS": "0", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(["sleep", "600"], env=environment) as process:
        yield process
        process.kill()


def warmed(raylet: int | str) -> subprocess.CompletedProcess[str]:
    environment = with_environment(RAY_RAYLET_PID=str(raylet))
    return subprocess.run([sys.executable, str(SHIM), WARM], env=environment, capture_output=True, text=True)


def test_a_node_s_zygotes_start_ahead_of_its_workers_and_end_with_its_raylet(
    raylet: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    (tmp_path / "wait.py").write_text(WAIT)
    assert warmed(raylet.pid).returncode == 0
    folder = Path(node_folder(str(raylet.pid)))
    assert warmed(raylet.pid).returncode == 0, "a second time it finds them"
    found = [one for one in psutil.process_iter() if str(folder) in cmdline(one)]
    assert sorted(cmdline(one)[-1] for one in found) == ["base", "model"]
    environment = {name: value for name, value in process_environment().items() if name != DIRECTORY_VARIABLE}
    environment |= {"RAY_RAYLET_PID": str(raylet.pid), "PYTHONPATH": str(ROOT)}
    shim = lone(str(tmp_path / "wait.py"), environment)
    assert shim.stdout is not None
    worker = psutil.Process(int(shim.stdout.readline()))
    assert worker.ppid() in [one.pid for one in found]
    raylet.kill()
    wait_until(lambda: not any(one.is_running() for one in (*found, worker)), "they end, and a worker that is left")
    wait_until(lambda: not folder.exists(), "no folder is left")
    end_of(shim)


@pytest.mark.parametrize("raylet", ["", "raylet", NO_PID])
def test_what_is_no_raylet_is_said_to_be_none(raylet: str) -> None:
    refused = warmed(raylet)
    assert refused.returncode == 1
    assert f"RAY_RAYLET_PID is {raylet!r}" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize("with_zygotes", [False, True])
def test_everything_ends_with_the_process_that_holds_the_zygotes(
    tmp_path: Path, apart: Path, monkeypatch: pytest.MonkeyPatch, with_zygotes: bool
) -> None:
    """Any end counts: here SIGKILL, with or without the zygotes."""
    monkeypatch.setattr(forked_workers, "FOLDER", str(apart))
    code = f"""
import subprocess, sys, time
from deployments import forked_workers
from deployments.forked_workers import SHIM, forking_cluster
forked_workers.FOLDER = {str(apart)!r}
with forking_cluster():
    command = [sys.executable, str(SHIM), "base", {str(tmp_path / "wait.py")!r}]
    worker = subprocess.Popen(command, start_new_session=True)
    time.sleep(600)
"""
    (tmp_path / "wait.py").write_text(WAIT)
    environment = with_environment(PYTHONPATH=str(ROOT))
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    assert holder.stdout is not None
    worker = psutil.Process(int(holder.stdout.readline()))
    started = [worker, *psutil.Process(holder.pid).children(recursive=True)]
    assert len(started) >= 4, "a worker, its shim, and two zygotes"
    (folder,) = {Path(word) for one in started for word in cmdline(one) if word.startswith(f"{apart}/troupe_zygotes_")}
    if with_zygotes:
        for process in started:
            process.kill()
    holder.kill()
    holder.wait()
    wait_until(lambda: not any(one.is_running() for one in started), "no process is left")
    if with_zygotes:
        assert folder.exists(), "no process is left to delete it"
        with forking_cluster():
            assert not folder.exists()
    wait_until(lambda: not folder.exists(), "no folder is left")


LATER = """
import json, sys
before = set(sys.modules)
from deployments.model_config import ModelConfig
from deployments.stages.rank import LoadRankParts
from engines.core.engine import RankContext
from engines.gang.rank import Rank
import deployments.app

alone = {"engine": "torch", "strategy": "ulysses", "num_ranks": 1}
LoadRankParts(model=ModelConfig(name="flux-shapes", denoiser=alone))(RankContext(rank=0, num_ranks=1, device="cpu"))()
tops = {name.partition(".")[0] for name in set(sys.modules) - before} - {name.partition(".")[0] for name in before}
print(json.dumps(sorted(tops)))
"""
ONLY_LATER = {"ray", "colorama", "tracemalloc", "_tracemalloc"}
"""Ray itself, and the modules it imports; Cython's own modules have a version in their names."""


@pytest.mark.parametrize("is_installed", [True, False])
def test_workers_import_triton_kernels_where_triton_is(is_installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: is_installed or None)
    kernels = tuple(f"engines.fast.triton_{name}" for name in ("kernels", "group_norm", "frames"))
    assert libraries_of("model") == LIBRARIES["model"] + kernels * is_installed
    assert libraries_of("base") == LIBRARIES["base"]


def test_a_rank_imports_no_library_after_its_fork_but_ray(directory: str) -> None:
    """Each worker of a node would import it again: name it in ``LIBRARIES``."""
    status, out, err = end_of(begin(LATER, level="model", env=with_environment(PYTHONPATH=str(ROOT))))
    assert status == 0, err
    later = {name for name in json.loads(out.splitlines()[-1]) if not name.startswith("_cython")}
    assert later <= ONLY_LATER, err
