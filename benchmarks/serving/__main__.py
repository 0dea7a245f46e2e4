"""The application on this machine's CPU: start, one picture, eight clients, what serving costs, memory.

    python -m benchmarks.serving [--quick]

First the ceiling: the bare pipeline in one process (``benchmarks.serving.bare``), while nothing else runs. Then the
laptop's configuration with picture gangs of 1 and 2 ranks, through HTTP. Served and bare pictures take turns, so that
other load of the machine affects both alike. The last line is one JSON document.
Reports: benchmarks/reports/serving_*.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import httpx

from benchmarks.application.client import PROMPT, STAGES, Client, timing
from benchmarks.application.memory import samples_of
from benchmarks.results import Spread
from benchmarks.serving.application import Application, demo_s, serving
from benchmarks.serving.bare import Times, bare
from deployments.cli.serving import load_config, parse_config
from deployments.config import ServeConfig

PICTURES, CLIPS = "flux-shapes", "wan-shapes"
TEAM_SIZES = (1, 2)
NUM_CLIENTS = 8
IDLE_S = 5.0
MEMORY_EVERY_S = 0.5
GIB = 2**30

Timed = Sequence[tuple[float, httpx.Response]]
"""Answers, each with the client's seconds."""


def main() -> None:
    arguments = parse(sys.argv[1:])
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {versions()}", flush=True)
    config = load_config(arguments.config)
    with bare(source(config)) as draw:
        ceiling = print_bare("bare", [draw() for _ in range(arguments.num_alone)])
    document: dict[str, Any] = {"hardware": f"{os.cpu_count()} cores {platform.machine()}", "versions": versions()}
    document["bare_s"] = {name: spread.rounded() for name, spread in ceiling.items()}
    for num_ranks in TEAM_SIZES:
        document[f"ranks_{num_ranks}"] = measure_gang(config, num_ranks, arguments)
    document["demo_s"] = say("make demo, installed", [demo_s() for _ in range(arguments.num_starts)]).rounded(1)
    document["load_at_end"] = round(os.getloadavg()[0], 1)
    print(json.dumps(document))


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repeats: to see that it works")
    parser.add_argument("--config", default="laptop", help="a config file, or the name of a shipped one")
    found = parser.parse_args(words)
    found.num_starts, found.num_alone, found.num_each = (1, 3, 1) if found.quick else (3, 20, 3)
    return found


def versions() -> str:
    named = ", ".join(f"{name} {version(name)}" for name in ("torch", "ray", "diffusers"))
    return f"Python {platform.python_version()}, {named}"


def say(what: str, values: Sequence[float], unit: str = "s") -> Spread:
    spread = Spread.of(values)
    print(f"{what:58} {spread} {unit}", flush=True)
    return spread


def source(config: ServeConfig) -> str:
    return next(model.source for model in config.app.models if model.name == PICTURES)


def print_bare(what: str, runs: Sequence[Times]) -> dict[str, Spread]:
    """Return the seconds from a request to its PNG in one process, with the plain module and with the engine."""
    for name in runs[0]:
        for part in ("denoise", "decode"):
            say(f"{what}, {name}: {part}", [run[name][part] for run in runs])
    return {name: say(f"{what}, {name}: picture", [run[name]["total"] for run in runs]) for name in runs[0]}


def with_ranks(config: ServeConfig, num_ranks: int) -> ServeConfig:
    """Return ``config`` with picture gangs of ``num_ranks`` ranks."""
    document = config.model_dump()
    for model in document["applications"][0]["args"]["models"]:
        if model["name"] == PICTURES:
            model["denoiser"]["num_ranks"] = num_ranks
    return parse_config(document)


def measure_gang(config: ServeConfig, num_ranks: int, arguments: argparse.Namespace) -> dict[str, Any]:
    print(f"\n{num_ranks} ranks", flush=True)
    ready_s, results = [], {}
    for index in range(arguments.num_starts):
        with serving(with_ranks(config, num_ranks)) as application:
            ready_s.append(application.ready_s)
            if index == arguments.num_starts - 1:
                results = measure_pictures(application, source(config), arguments) | measure_footprint(application)
    return {"ready_s": say("from the command to ready", ready_s).rounded(1), **results}


def measure_pictures(application: Application, model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    with Client(application.url) as client:
        client.paint_each(bodies(900, 4), num_clients=2)  # warm-up
        alone, shares = in_turns(client, model, arguments.num_alone)
        num = NUM_CLIENTS * arguments.num_each
        took_s, together = client.paint_each(bodies(100, num), NUM_CLIENTS)
    return {
        "alone": spreads(alone, 1, sum(latency_s for latency_s, _ in alone)),
        "eight_clients": spreads(together, NUM_CLIENTS, took_s),
        "share_of_serving": shares,
    }


def bodies(first_seed: int, num: int) -> list[dict[str, Any]]:
    """Return requests with their own seeds and prompts, whose encodings are not cached."""
    seeds = range(first_seed, first_seed + num)
    return [{"model": PICTURES, "prompt": f"{PROMPT}, number {seed}", "seed": seed} for seed in seeds]


def in_turns(client: Client, model: str, num: int) -> tuple[Timed, dict[str, float]]:
    """Return one client's pictures, and the share of each that the same picture does not take in one process."""
    answers: list[tuple[float, httpx.Response]] = []
    bare_runs: list[Times] = []
    with bare(model) as draw:
        for body in bodies(0, num):
            answers += client.paint_each([body], 1)[1]
            bare_runs.append(draw())
    print_bare("bare in turns", bare_runs)
    shares = {}
    for name in bare_runs[0]:
        pairs = zip(bare_runs, answers, strict=True)
        percents = [100 * (1 - run[name]["total"] / latency_s) for run, (latency_s, _) in pairs]
        shares[name] = round(say(f"share of serving in a picture, bare {name}", percents, "%").median / 100, 3)
    return answers, shares


def spreads(answers: Timed, num_clients: int, took_s: float) -> dict[str, Any]:
    name = f"{num_clients} client{'s' if num_clients > 1 else ''}"
    timings = [timing(answer) for _, answer in answers]
    stages = {stage: say(f"{name}: {stage}", [one[stage] / 1000 for one in timings]) for stage in STAGES}
    latency = say(f"{name}: picture, as the client sees it", [latency_s for latency_s, _ in answers])
    pictures_per_s = len(answers) / took_s
    print(f"{f'{name}: pictures per second':58} {pictures_per_s:.2f}", flush=True)
    return {
        "latency_s": latency.rounded(),
        "stages_s": {stage: spread.rounded() for stage, spread in stages.items()},
        "pictures_per_s": round(pictures_per_s, 3),
    }


def measure_footprint(application: Application) -> dict[str, Any]:
    """Return memory and CPU at rest, and the highest memory while eight clients and a clip are served."""
    time.sleep(IDLE_S)
    idle_cores, idle = application.cpu_share(IDLE_S), application.memory()
    with samples_of(application.memory, MEMORY_EVERY_S) as samples, Client(application.url) as client:
        films = threading.Thread(target=client.film, kwargs={"model": CLIPS})
        films.start()
        client.paint_each(bodies(500, NUM_CLIENTS), NUM_CLIENTS)
        films.join()
    peak_gib = max(sample.pss_bytes for sample in samples) / GIB
    print(f"{'memory at rest / at most under load':58} {idle.pss_bytes / GIB:.2f} / {peak_gib:.2f} GiB")
    print(f"{'processes; cores in use at rest':58} {idle.num_processes}; {idle_cores:.2f}", flush=True)
    return {
        "memory_gib": {"idle": round(idle.pss_bytes / GIB, 2), "peak": round(peak_gib, 2)},
        "num_processes": idle.num_processes,
        "idle_cores": round(idle_cores, 3),
    }


if __name__ == "__main__":
    main()
