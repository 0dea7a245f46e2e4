"""Processes of a running application by kind, and random kills of them."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

KINDS = {
    "rank": "ray::Rank",
    "ingress": "ray::ServeReplica:troupe:Ingress",
    "encoder": "ray::ServeReplica:troupe:TextEncoder",
    "denoiser": "ray::ServeReplica:troupe:Denoiser",
    "decoder": "ray::ServeReplica:troupe:VaeDecoder",
    "codec": "ray::ServeReplica:troupe:Codec",
    "proxy": "ray::ProxyActor",
    "controller": "ray::ServeController",
}
"""Beginnings of process titles by kind. A process has its title already while it starts."""
STOPPED_FOR_S = 20.0
"""A stopped process that was not ended continues after that."""


def processes_of(server: psutil.Process) -> dict[str, list[psutil.Process]]:
    """Return the running processes of each kind."""
    by_kind: dict[str, list[psutil.Process]] = {kind: [] for kind in KINDS}
    for process in server.children(recursive=True):
        with suppress(psutil.Error):
            title = (process.cmdline() or [""])[0]
            for kind, beginning in KINDS.items():
                if title.startswith(beginning) and process.status() != psutil.STATUS_ZOMBIE:
                    by_kind[kind].append(process)
    return by_kind


@dataclass(kw_only=True, slots=True)
class Killer:
    """Kills or stops a process every ``every_s`` on average. The kind is drawn first, then one of its processes.

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
        number = self.rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP))
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
