"""Ranks start with the right arguments, and a start in which one hangs fails."""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import ray
from ray.exceptions import RayActorError

from engines.core import logs
from engines.core.engine import RankContext
from engines.core.resources import MemoryUse
from engines.gang import gang as gang_module
from engines.gang.errors import GangBrokenError
from engines.gang.eta.measured_times import StepTimes
from engines.gang.gang import Gang
from engines.gang.gang_config import FIRST_PROCESS_S, BuildRank, BuiltRank, GangConfig
from engines.gang.rank import spawn_ranks
from engines.gang.start import PING_EVERY_S, Start
from tests.engines.gang.support.fakes import FAKE_ESTIMATES, FakeRequest, fake_job, load_fake, reference_latents
from tests.engines.gang.support.helpers import alive, eventually, group_for, latents
from tests.engines.gang.support.set_clock import SetClock, answered, remote, settled

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIBRARY = "libtroupe_probe.so"
CONFIG = GangConfig(num_ranks=2, cpus_per_rank=0.1)
PHASES = ("ping", "open", "open_store", "join", "load", "build")
"""Phases of a start, in order."""
DEADLINES = GangConfig(
    num_ranks=2,
    process_deadline_s=1.0,
    connect_deadline_s=2.0,
    load_deadline_s=3.0,
    build_deadline_s=4.0,
    silence_deadline_s=5.0,
    start_deadline_s=6.0,
)


class HangingRanks:
    """Two ranks that answer every call at once, except that rank 1 (rank 0, if called alone) hangs in ``hangs``. With
    ``is_silent`` neither answers a ping after that."""

    def __init__(self, hangs: str, *, is_silent: bool = False) -> None:
        self.hangs, self._is_silent = hangs, is_silent
        self.asked: list[str] = []
        self.actors = [SimpleNamespace(**{name: self._method(rank, name) for name in PHASES}) for rank in range(2)]

    def _method(self, rank: int, name: str) -> SimpleNamespace:
        def answer(*_: object) -> asyncio.Future[object]:
            self.asked.append(name)
            hangs = name == self.hangs and (rank == 1 or name == "open_store")
            is_mute = name == "ping" and self._is_silent and self.hangs in self.asked
            return asyncio.get_running_loop().create_future() if hangs or is_mute else answered((1, 2))

        return remote(answer)


async def start(ranks: HangingRanks, clock: SetClock, config: GangConfig = DEADLINES) -> asyncio.Task[object]:
    """Return a start that has reached its hang."""
    starting = asyncio.create_task(Start(config, lambda: ranks.actors, clock).run(load_fake))
    while ranks.hangs not in ranks.asked:
        await settled()
    await settled()
    return starting


@pytest.mark.parametrize(
    ("phase", "deadline_s", "reason"),
    [
        ("ping", 1.0, r"ranks \[1\] did not start their processes within 1 s"),
        ("open", 1.0, r"ranks \[1\] did not open their devices within 1 s"),
        ("open_store", 2.0, r"ranks \[0\] did not connect within 2 s"),
        ("join", 2.0, r"ranks \[1\] did not connect within 2 s"),
        ("load", 3.0, r"ranks \[1\] did not load their weights within 3 s"),
        ("build", 4.0, r"ranks \[1\] did not build their engines within 4 s"),
    ],
)
async def test_a_rank_that_hangs_is_found_by_the_deadline_of_its_phase(
    phase: str, deadline_s: float, reason: str
) -> None:
    ranks, clock = HangingRanks(phase), SetClock()
    starting = await start(ranks, clock)
    await clock.advance(0.99 * deadline_s)
    assert not starting.done()
    await clock.advance(0.02 * deadline_s)
    with pytest.raises(GangBrokenError, match=reason) as caught:
        await starting
    assert caught.value.cause == "deadline"
    assert PHASES.index(phase) == max(PHASES.index(name) for name in ranks.asked), "nothing was asked after that"


async def test_processes_that_hang_are_replaced_after_twice_as_long_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed = list[Any]()
    monkeypatch.setattr("engines.gang.start.kill_ranks", killed.append)
    made, clock = [HangingRanks("ping"), HangingRanks("ping"), HangingRanks("none of them")], SetClock()
    config, spawned = replace(DEADLINES, process_deadline_s=180.0, start_deadline_s=600.0), iter(made)
    start = Start(config, lambda: next(spawned).actors, clock)
    starting = asyncio.create_task(start.run(load_fake))
    for number, limit_s in enumerate((12.0, 24.0)):
        while "ping" not in made[number].asked:
            await settled()
        await clock.advance(limit_s - 0.1)
        assert len(killed) == number
        await clock.advance(0.1)
    await starting
    assert killed == [ranks.actors for ranks in made[:2]]
    assert start.ranks == made[2].actors


async def test_attempts_at_processes_take_their_deadline_altogether() -> None:
    attempts = {deadline_s: GangConfig(process_deadline_s=deadline_s).process_attempts_s() for deadline_s in (180, 30)}
    assert [*attempts[180]] == [12, 24, 48, 96]
    assert [*attempts[30]] == [12, 18]


async def test_a_phase_without_a_deadline_has_what_is_left_of_the_start() -> None:
    config, clock = replace(DEADLINES, build_deadline_s=None), SetClock()
    starting = await start(HangingRanks("build"), clock, config)
    await clock.advance(5.99)
    assert not starting.done()
    await clock.advance(0.02)
    with pytest.raises(GangBrokenError, match="did not build their engines within 6 s"):
        await starting


@pytest.mark.parametrize("phase", ["open", "join", "load", "build"])
async def test_silent_ranks_are_found_before_the_deadline_of_their_phase(phase: str) -> None:
    """Stopped processes behave like this."""
    limits: dict[str, Any] = {f"{name}_deadline_s": 60.0 for name in ("process", "connect", "load", "build")}
    ranks, clock = HangingRanks(phase, is_silent=True), SetClock()
    starting = await start(ranks, clock, replace(DEADLINES, **limits, start_deadline_s=100.0))
    await clock.advance(PING_EVERY_S)
    assert not starting.done()
    await clock.advance(5.0)
    with pytest.raises(GangBrokenError, match=r"ranks \[0, 1\] answered no ping for 5 s"):
        await starting


async def test_ranks_that_import_their_libraries_may_be_silent_for_longer() -> None:
    assert (CONFIG.silence_s(is_forked=True), CONFIG.silence_s(is_forked=False)) == (10.0, 60.0)
    assert DEADLINES.silence_s(is_forked=False) == 5.0


async def test_each_phase_leaves_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    ranks = HangingRanks("none of them")
    await Start(DEADLINES, lambda: ranks.actors, SetClock(), "fake").run(load_fake)
    lines = [record.__dict__ for record in caplog.records if record.message == logs.MESSAGE]
    assert [line["phase"] for line in lines] == [f"gang: {name}" for name in ("processes", "connect", "load", "build")]
    assert {line["model"] for line in lines} == {"fake"}
    assert {line["took_s"] for line in lines} == {0.0}, "times are the gang's clock's"


@pytest.mark.parametrize("granted", [(7, 8), None])
async def test_ranks_prepare_the_host_memory_that_they_are_granted_before_they_build(
    granted: tuple[int, int] | None,
) -> None:
    asked: list[tuple[str, int, object]] = []

    def method(rank: int, name: str) -> SimpleNamespace:
        def answer(value: object = None) -> asyncio.Future[object]:
            asked.append((name, rank, value))
            return answered(MemoryUse(weights=rank + 1))

        return remote(answer)

    async def grant(uses: Sequence[MemoryUse]) -> Sequence[int] | None:
        assert [use.weights for use in uses] == [1, 2]
        return granted

    names = (*PHASES, "memory_use", "prepare_host_memory")
    ranks = [SimpleNamespace(**{name: method(rank, name) for name in names}) for rank in range(2)]
    await Start(DEADLINES, lambda: ranks, SetClock(), grant=grant).run(load_fake)
    order = list(dict.fromkeys(name for name, *_ in asked))
    assert order[-4:] == ["load", "memory_use", "prepare_host_memory", "build"]
    limits = {rank: value for name, rank, value in asked if name == "prepare_host_memory"}
    assert limits == dict(enumerate(granted or (None, None)))


async def test_a_node_that_does_not_say_what_its_ranks_need_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    config, clock, anywhere = replace(DEADLINES, num_nodes=2), SetClock(), Mock()
    asked = Mock(return_value=asyncio.get_running_loop().create_future())
    monkeypatch.setattr(ray, "remote", lambda **_: lambda _: Mock(options=lambda **_: Mock(remote=asked)))
    starting = asyncio.create_task(
        Gang.start(config, load_fake, environment=refuse, placement_group=anywhere, clock=clock)
    )
    await settled()
    await clock.advance(DEADLINES.process_deadline_s + 0.1)
    with pytest.raises(GangBrokenError, match="nodes did not say what their ranks need within 1 s"):
        starting.result()


class UnknownRanksError(Exception):
    pass


async def test_ranks_of_whose_times_nothing_can_be_told_do_not_outlive_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks, killed = HangingRanks("none of them").actors, list[object]()

    async def ready(start: Start, _load: object) -> tuple[list[Any], BuiltRank]:
        start.ranks = start._spawn()
        return [], BuiltRank(team_sizes=(2,))

    def step_times(*_: object) -> StepTimes:
        raise UnknownRanksError

    monkeypatch.setattr(gang_module, "spawn_ranks", lambda *_: ranks)
    monkeypatch.setattr(gang_module, "kill_ranks", killed.extend)
    monkeypatch.setattr(Start, "run", ready)
    anywhere: Any = object()
    with pytest.raises(UnknownRanksError):
        await Gang.start(DEADLINES, load_fake, placement_group=anywhere, step_times=step_times, clock=SetClock())
    assert killed == ranks


def load_stopped(pid_file: Path, context: RankContext) -> BuildRank:
    """Stop rank 1 while it loads."""
    if context.rank == 1:
        pid_file.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    return load_fake(context)


def read_with_a_bad_disk(file: Path, context: RankContext) -> BuildRank:
    """Let ranks read a file together; rank 1 cannot read its share, which rank 0 waits for."""
    import torch

    from engines.parallel import file_reading
    from engines.parallel.early_start import host_axis

    def refuse(view: memoryview, piece: file_reading.Span) -> None:
        raise OSError(f"the disk of rank {context.rank} is broken")

    if context.rank == 1:
        file_reading._read_into = refuse
    cpu, target_B = torch.device("cpu"), torch.empty(file.stat().st_size, dtype=torch.uint8)
    with file.open("rb") as opened, file_reading.SpanReader(cpu, host_axis(context)) as reader:
        reader.read([file_reading.Span(file=opened.fileno(), offset=0, target_B=target_B)])
    return load_fake(context)


def decide_without_a_checkpoint(folder: Path, context: RankContext) -> BuildRank:
    """Fail on rank 1 before the exchange that decides on sliced loading, in which rank 0 waits."""
    import torch

    from engines.planner.measure import smallest_memory_bytes

    if context.rank == 1:
        raise OSError(f"rank {context.rank} finds no checkpoint")
    (folder / "waits").touch()
    smallest_memory_bytes(torch.device("cpu"))
    (folder / "went on").touch()
    return load_fake(context)


async def test_a_rank_that_fails_before_an_exchange_ends_the_start_with_its_own_error(
    ray_cluster: None, tmp_path: Path
) -> None:
    """The clock stands still, so no deadline passes: rank 0 would wait for ever."""
    load = partial(decide_without_a_checkpoint, tmp_path)
    with group_for(CONFIG) as group, pytest.raises(OSError, match="rank 1 finds no checkpoint"):
        await Gang.start(CONFIG, load, placement_group=group, clock=SetClock())
    assert not (tmp_path / "went on").exists()


async def test_a_rank_that_cannot_read_its_share_ends_the_start_with_its_own_error(
    ray_cluster: None, tmp_path: Path
) -> None:
    """The clock stands still, so no deadline passes."""
    (tmp_path / "weights").write_bytes(bytes(1000))
    load = partial(read_with_a_bad_disk, tmp_path / "weights")
    with group_for(CONFIG) as group, pytest.raises(OSError, match="the disk of rank 1 is broken"):
        await Gang.start(CONFIG, load, placement_group=group, clock=SetClock())


async def test_a_process_that_is_stopped_while_it_loads_ends_the_start(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No time passes before the other rank has answered its pings, which it does in order."""
    clock, pid_file, ranks = SetClock(), tmp_path / "pid", list[Any]()

    def spawned(*args: Any) -> list[Any]:
        ranks.extend(spawn_ranks(*args))
        return ranks

    monkeypatch.setattr(gang_module, "spawn_ranks", spawned)
    with group_for(CONFIG) as group:
        load = partial(load_stopped, pid_file)
        config = replace(CONFIG, silence_deadline_s=5.0)
        starting = asyncio.create_task(Gang.start(config, load, placement_group=group, clock=clock))
        await eventually(lambda: pid_file.exists() and pid_file.read_text())
        pid = int(pid_file.read_text())
        await eventually(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        while not starting.done():
            await clock.advance(PING_EVERY_S)
            with suppress(RayActorError):  # it was killed
                await ranks[0].ping.remote()
            await settled()
        with pytest.raises(GangBrokenError, match=r"ranks \[1\] answered no ping for 5 s"):
            await starting
        await eventually(lambda: not alive([pid]))
        monkeypatch.undo()
        gang = await Gang.start(CONFIG, load_fake, placement_group=group, clock=SetClock())  # the bundles are free
        await gang.close()


STOPPED_TORCH = """
import os, pathlib, signal
(pathlib.Path(__file__).parent / str(os.getpid())).touch()
os.kill(os.getpid(), signal.SIGSTOP)
"""
"""Replaces the first library that a rank imports."""


async def test_processes_that_are_stopped_while_they_import_end_the_start(ray_cluster: None, tmp_path: Path) -> None:
    """Both ranks are stopped and answer no pings."""
    config, clock, torch = replace(CONFIG, silence_deadline_s=5.0), SetClock(), tmp_path / "torch"
    torch.mkdir()
    (torch / "__init__.py").write_text(STOPPED_TORCH)
    with group_for(CONFIG) as group:
        stopped: partial[dict[str, str]] = partial(dict, PYTHONPATH=str(tmp_path))
        starting = asyncio.create_task(
            Gang.start(config, load_fake, environment=stopped, placement_group=group, clock=clock)
        )
        await eventually(lambda: sum(path.name.isdigit() for path in torch.iterdir()) == config.num_ranks)
        pids = [int(path.name) for path in torch.iterdir() if path.name.isdigit()]
        await eventually(lambda: all(psutil.Process(pid).status() == psutil.STATUS_STOPPED for pid in pids))
        await clock.advance(4.9)
        assert not starting.done()
        await clock.advance(PING_EVERY_S + 5.0)
        with pytest.raises(GangBrokenError, match=r"ranks \[.+\] answered no ping for 5 s"):
            await starting
        await eventually(lambda: not alive(pids))


HUNG_ONCE = """
import os, pathlib, sys, time

class Hanging:
    @staticmethod
    def find_spec(name, *_):
        folder = pathlib.Path(__file__).parent
        if name == "engines.gang.rank" and len(list(folder.glob("[0-9]*"))) < 2:
            (folder / str(os.getpid())).touch()
            time.sleep(1000)

sys.meta_path.insert(0, Hanging)
"""
"""Runs before a process's first import: the first two processes hang when they import the ranks' module."""


async def test_processes_that_hang_before_they_answer_are_replaced(ray_cluster: None, tmp_path: Path) -> None:
    """Neither a death nor a missed ping would ever reveal them."""
    (tmp_path / "sitecustomize.py").write_text(HUNG_ONCE)
    own = {"PYTHONPATH": str(tmp_path), "PYTHONNODEBUGRANGES": "1"}  # a fork cannot change the latter
    clock, hung = SetClock(), partial[dict[str, str]](dict, own)
    with group_for(CONFIG) as group:
        starting = asyncio.create_task(
            Gang.start(CONFIG, load_fake, environment=hung, placement_group=group, clock=clock)
        )
        await eventually(lambda: len([*tmp_path.glob("[0-9]*")]) == CONFIG.num_ranks)
        await clock.advance(FIRST_PROCESS_S - 0.1)
        assert not starting.done()
        await clock.advance(0.2)
        gang = await starting
        request = FakeRequest(seed=3, num_steps=2)
        assert (await latents(gang, fake_job("one", request))).equal(reference_latents(request))
        await gang.close()
        await eventually(lambda: not alive([int(path.name) for path in tmp_path.glob("[0-9]*")]))


def search_path(folder: Path) -> Mapping[str, str]:
    return {"LD_LIBRARY_PATH": f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}"}


def load_with_library(context: RankContext) -> BuildRank:
    """Load the library. Raise OSError if the loader does not find it by its name alone."""
    ctypes.CDLL(LIBRARY)
    return load_fake(context)


def any_shared_library() -> Path:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return next(path for line in lines if (path := Path(line.split()[-1])).name.startswith("libm.so"))


async def test_ranks_find_libraries_where_the_engine_says(ray_cluster: None, tmp_path: Path) -> None:
    shutil.copy(any_shared_library(), tmp_path / LIBRARY)
    with group_for(CONFIG) as group:
        environment = partial(search_path, tmp_path)
        gang = await Gang.start(CONFIG, load_with_library, environment=environment, placement_group=group)
        request = FakeRequest(seed=3, num_steps=2)
        given = await latents(gang, fake_job("one", request))
        await gang.close()
        assert given.equal(reference_latents(request))
        assert gang.estimates == FAKE_ESTIMATES, "the ranks' estimates"
        with pytest.raises(OSError, match=LIBRARY):
            await Gang.start(CONFIG, load_with_library, placement_group=group)


def refuse() -> Mapping[str, str]:
    raise RuntimeError("there is no such library here")


async def test_an_environment_that_cannot_be_made_is_the_error_of_the_start(ray_cluster: None) -> None:
    with group_for(CONFIG) as group, pytest.raises(RuntimeError, match="no such library here"):
        await Gang.start(CONFIG, load_fake, environment=refuse, placement_group=group)
