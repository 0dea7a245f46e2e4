"""Faults during a picture, one after the other: when it is answered, and where the seconds go.

    python -m benchmarks.faults.recovery [--config laptop] [--set KEY=VALUE] [--folder FOLDER [--model FLUX.1-dev]]
                                         [--steps 60] [--repeats 1] [--rest-s 30] [--out FILE]

Kills a rank, kills the replica, and stops a rank (SIGSTOP), each at the picture's third step and ``--rest-s`` after the
last. Prints a table for each, and writes ``--out`` after it. The status is 1 if an answer has other bytes than without
the fault. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.application.client import last_event
from benchmarks.faults.kills import processes_of
from benchmarks.faults.timeline import Span, inside, rank_pids, records_of, spans
from benchmarks.serving.application import Application, serving
from benchmarks.serving.settings import add_options, config_of
from deployments.cli.local import uses_proxies
from deployments.config import ServeConfig

IMAGES = "/v1/images/generations"
STRIKE_AT_STEP = 3
TIMEOUT_S = 600.0


@dataclass(kw_only=True, slots=True)
class Answer:
    """A picture, and when its parts came, in Unix time."""

    began_s: float
    data: bytes = b""
    ended_s: float = 0.0
    steps: list[tuple[int, float]] = field(default_factory=list)
    """Steps in order with their times, also those of a run that was lost."""

    @property
    def took_s(self) -> float:
        return self.ended_s - self.began_s

    def first_step_after(self, fault_s: float) -> float:
        """Return the time of the new gang's first step."""
        return next(at_s for step, at_s in self.steps if at_s > fault_s and step <= STRIKE_AT_STEP)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--steps", type=int, default=60, help="of the picture")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--rest-s", type=float, default=5.0)
    parser.add_argument("--out", type=Path, help="file for the document, also of an unfinished run")
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    config = config_of(arguments).with_metrics(None)
    with serving(config) as application:
        document = run(application, config, arguments)
    print(json.dumps(document))
    sys.exit(0 if all(one["same_bytes"] for one in document["recoveries"]) else 1)


def run(application: Application, config: ServeConfig, arguments: argparse.Namespace) -> dict[str, Any]:
    model = config.app.models[0].name
    ask(application.url, model, arguments.steps)
    lone = ask(application.url, model, arguments.steps)
    print(f"{model}: {lone.took_s:.2f} s alone, {arguments.steps} steps", flush=True)
    recoveries: list[dict[str, Any]] = []
    document = {"model": model, "lone_s": round(lone.took_s, 2), "pss_gib": 0.0, "recoveries": recoveries}
    for name, strike in faults(application, model).items():
        for _ in range(arguments.repeats):
            time.sleep(arguments.rest_s)
            recoveries.append(recovery(application, model, name, strike, lone, arguments.steps))
            document["pss_gib"] = round(application.memory().pss_bytes / 2**30, 2)
            if arguments.out:
                arguments.out.write_text(json.dumps(document))
    return document


def recovery(
    application: Application, model: str, name: str, strike: Callable[[], None], lone: Answer, num_steps: int
) -> dict[str, Any]:
    struck_s: list[float] = []

    def at_step(step: int) -> None:
        if step == STRIKE_AT_STEP and not struck_s:
            strike()
            struck_s.append(time.time())

    answer = ask(application.url, model, num_steps, at_step)
    (fault_s,) = struck_s
    records = records_of(application.logs)
    parts = spans(records, model, fault_s, answer.first_step_after(fault_s), answer.ended_s)
    within = inside(records, fault_s, answer.ended_s)
    later_s = answer.took_s - lone.took_s
    print_table(name, parts, within, later_s)
    return {
        "fault": name,
        "later_s": round(later_s, 2),
        "same_bytes": answer.data == lone.data,
        "parts_s": {part.what: round(part.took_s, 2) for part in parts},
        "ranks_s": within,
        "load": round(os.getloadavg()[0], 1),
    }


def print_table(name: str, parts: list[Span], within: dict[str, float], later_s: float) -> None:
    print(f"\n{name}: answered {later_s:.2f} s later than alone\n{'':<58}    from   until    took")
    for part in parts:
        print(part)
    for what, took_s in within.items():
        print(f"  of which {what:<65} {took_s:7.2f}")
    sys.stdout.flush()


def faults(application: Application, model: str) -> dict[str, Callable[[], None]]:
    """Return the faults of the gang of ``model`` by name."""

    def signal_rank(number: signal.Signals) -> None:
        os.kill(rank_pids(application.logs, model)[-1], number)

    def kill_replica() -> None:
        replicas = processes_of(application.process)["denoiser"]
        title = f"ray::ServeReplica:troupe:Denoiser-{model}"
        next(process for process in replicas if process.cmdline()[0].startswith(title)).kill()

    return {
        "kill -9 of a rank": lambda: signal_rank(signal.SIGKILL),
        "kill -9 of the replica": kill_replica,
        "SIGSTOP of a rank": lambda: signal_rank(signal.SIGSTOP),
    }


def ask(url: str, model: str, num_steps: int, at_step: Callable[[int], None] = lambda step: None) -> Answer:
    """Return a streamed picture, and call ``at_step`` with each step. RuntimeError if there is no picture."""
    body = {"model": model, "prompt": "a red circle", "seed": 1, "num_inference_steps": num_steps}
    answer = Answer(began_s=time.time())

    def note(step: int) -> None:
        answer.steps.append((step, time.time()))
        at_step(step)

    wanted = {**body, "stream": True, "stream_progress": True}
    through_proxies = uses_proxies(url)
    with httpx.stream("POST", f"{url}{IMAGES}", json=wanted, timeout=TIMEOUT_S, trust_env=through_proxies) as response:
        event = last_event(response, note)
    if event.get("type") != "image_generation.completed":
        raise RuntimeError(f"no picture, but {event}")
    answer.ended_s, answer.data = time.time(), base64.b64decode(event["b64_json"])
    return answer


if __name__ == "__main__":
    main()
