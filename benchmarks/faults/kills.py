"""Processes of a running application by kind, and random kills of them."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

from benchmarks.faults.timeline import rank_pids
from benchmarks.serving.application import Application

KINDS = {
    "rank": "ray::Rank",
    "ingress": "ray::ServeReplica:troupe:Ingress",
    "encoder": "ray::ServeReplica:troupe:TextEncoder",
    "denoiser": "ray::ServeReplica:troupe:Denoiser",
    "decoder": "ray::ServeReplica:troupe:VaeDecoder",
    "codec": "ray::ServeReplica:troupe:Codec",
    "proxy": "ray::ProxyActor",
    "controller": "ray::ServeController",
    "arbiter": "ray::ShareActor",
    "haproxy": "haproxy",
}
"""Beginnings of their titles, without folders, also while they start."""
STOPPED_FOR_S = 20.0
"""A stopped process continues after that, unless it was ended."""

SIGNALS = {"SIGSTOP": signal.SIGSTOP, "kill -9": signal.SIGKILL}
ORDER = ("rank", "denoiser", "codec", "encoder", "decoder", "ingress", "proxy", "haproxy")
"""Kinds by importance."""
OF_A_MODEL = ("denoiser", "codec", "encoder", "decoder")
NUM_IN_A_START, NEW_RANKS_WITHIN_S = 2, 60.0


def processes_of(server: psutil.Process) -> dict[str, list[psutil.Process]]:
    """Return the running processes of each kind."""
    by_kind: dict[str, list[psutil.Process]] = {kind: [] for kind in KINDS}
    for process in server.children(recursive=True):
        with suppress(psutil.Error):
            title = (process.cmdline() or [""])[0].rpartition("/")[2]
            for kind, beginning in KINDS.items():
                if title.startswith(beginning) and process.status() != psutil.STATUS_ZOMBIE:
                    by_kind[kind].append(process)
    return by_kind


@dataclass(kw_only=True, slots=True)
class Killer:
    """Kills, ends or stops a process every ``every_s`` on average. The kind is drawn first, then one of its processes.

    Now and then the next strike follows at once, and hits what starts in the other's place.
    """

    server: psutil.Process
    every_s: float
    rng: random.Random
    kinds: Collection[str] = tuple(KINDS)
    kills: Counter[str] = field(default_factory=Counter)
    struck: list[tuple[float, str]] = field(default_factory=list)
    """Time of each strike (``time.monotonic``) and the kind of the process."""
    _stopped: list[tuple[float, psutil.Process]] = field(default_factory=list)

    def go_on(self, until: threading.Event) -> None:
        while not until.wait(self._pause_s()):
            self._wake()
            self.strike()
        self._wake(all_of_them=True)

    def strike(self) -> None:
        candidates = {kind: found for kind, found in processes_of(self.server).items() if found and kind in self.kinds}
        if not candidates:
            return
        kind = self.rng.choice(sorted(candidates))
        victim = self.rng.choice(sorted(candidates[kind], key=lambda process: process.pid))
        number = self.rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM))
        with suppress(psutil.Error):
            victim.send_signal(number)
            self.struck.append((time.monotonic(), kind))
            self.kills[f"{number.name} {kind}"] += 1
            print(f"{time.strftime('%H:%M:%S')} {number.name} {kind} {victim.pid}", flush=True)
            if number == signal.SIGSTOP:
                self._stopped.append((time.monotonic() + STOPPED_FOR_S, victim))

    def _pause_s(self) -> float:
        return self.rng.uniform(1.0, 4.0) if self.rng.random() < 0.2 else self.rng.uniform(0.5, 1.5) * self.every_s

    def _wake(self, *, all_of_them: bool = False) -> None:
        due = [entry for entry in self._stopped if all_of_them or entry[0] <= time.monotonic()]
        for entry in due:
            self._stopped.remove(entry)
            with suppress(psutil.Error):
                entry[1].send_signal(signal.SIGCONT)


Strike = Callable[[], Sequence[psutil.Process]]
"""Sends the signals at once and returns the processes."""
Aim = Callable[[], Strike]
"""Searches for the processes, which takes time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A signal to one or two processes."""

    name: str
    aim: Aim


def faults(application: Application, model: str) -> Iterator[Fault]:
    """Yield the faults of which there are processes, the most important first."""
    found = processes_of(application.process)
    kinds = [kind for kind in ORDER if found[kind]]
    for name, number in SIGNALS.items():
        for kind in kinds:
            yield Fault(name=f"{name} {kind}", aim=_aim(application, model, kind, number))
        yield Fault(name=f"{name} controller, kill -9 rank", aim=_aim_at_both(application, model, number))
        yield Fault(name=f"{name} new ranks in a start", aim=_aim_at_a_start(application, model, number))


def _aim(application: Application, model: str, kind: str, number: signal.Signals) -> Aim:
    def aim() -> Strike:
        victim = find(application, model, kind)
        return lambda: (send(victim, number),)

    return aim


def _aim_at_both(application: Application, model: str, number: signal.Signals) -> Aim:
    """Strike controller and rank at once: the controller cannot notice that the gang is lost."""

    def aim() -> Strike:
        controller, rank = (find(application, model, kind) for kind in ("controller", "rank"))
        return lambda: (send(controller, number), send(rank, signal.SIGKILL))

    return aim


def _aim_at_a_start(application: Application, model: str, number: signal.Signals) -> Aim:
    """Kill a rank, and strike the new ranks as soon as they are seen."""

    def aim() -> Strike:
        rank = find(application, model, "rank")
        known = {process.pid for process in processes_of(application.process)["rank"]}
        num_new = min(NUM_IN_A_START, len(rank_pids(application.logs, model)))

        def strike() -> Sequence[psutil.Process]:
            send(rank, signal.SIGKILL)
            end_s = time.monotonic() + NEW_RANKS_WITHIN_S
            struck: dict[int, psutil.Process] = {}
            while len(struck) < num_new and time.monotonic() < end_s:
                for process in processes_of(application.process)["rank"]:
                    if process.pid not in known | struck.keys():
                        struck[process.pid] = send(process, number)
            return tuple(struck.values())

        return strike

    return aim


def find(application: Application, model: str, kind: str) -> psutil.Process:
    """Return a process of the kind, of ``model`` where each model has its own. RuntimeError if there is none."""
    if kind == "rank":
        return psutil.Process(rank_pids(application.logs, model)[-1])
    beginning = f"{KINDS[kind]}-{model}" if kind in OF_A_MODEL else KINDS[kind]
    for process in processes_of(application.process)[kind]:
        with suppress(psutil.Error):
            if process.cmdline()[0].rpartition("/")[2].startswith(beginning):
                return process
    raise RuntimeError(f"no process of {beginning}")


def send(victim: psutil.Process, number: signal.Signals) -> psutil.Process:
    """Send a signal, unless the process has ended, and return the process."""
    with suppress(psutil.NoSuchProcess):
        victim.send_signal(number)
    return victim
