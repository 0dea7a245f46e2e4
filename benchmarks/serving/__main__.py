"""The application on this machine's CPU: start, one picture, eight clients, what serving costs, memory.

    python -m benchmarks.serving [--quick]

First the ceiling: the bare pipeline in one process (``benchmarks.serving.bare``), while nothing else runs. Then the
laptop's configuration with picture gangs of 1 and 2 ranks, through HTTP; served and bare pictures are drawn in turns,
so that what else the machine does hits both alike. The last line is one JSON document.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

from benchmarks.serving.application import Application, Memory, demo_s, serving
from benchmarks.serving.bare import Times, bare
from benchmarks.serving.clients import STAGES, Answer, Load, ask, clip
from benchmarks.spread import Spread
from deployments.cli.serving import load_config, parse_config
from deployments.config import ServeConfig

PICTURES, CLIPS = "flux-shapes", "wan-shapes"
TEAM_SIZES = (1, 2)
NUM_CLIENTS = 8
IDLE_S = 5.0
GIB = 2**30


class Arguments(argparse.Namespace):
    quick: bool
    config: str

    @property
    def num_starts(self) -> int:
        return 1 if self.quick else 3

    @property
    def num_alone(self) -> int:
        return 3 if self.quick else 20

    @property
    def num_each(self) -> int:
        return 1 if self.quick else 3


def main() -> None:
    arguments = parse(sys.argv[1:])
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {versions()}", flush=True)
    config = load_config(arguments.config)
    with bare(source(config)) as draw:
        ceiling = tell_bare("bare", [draw() for _ in range(arguments.num_alone)])
    document: dict[str, Any] = {"hardware": f"{os.cpu_count()} cores {platform.machine()}", "versions": versions()}
    document["bare_s"] = {name: spread.rounded() for name, spread in ceiling.items()}
    for num_ranks in TEAM_SIZES:
        document[f"ranks_{num_ranks}"] = measure_ranks(config, num_ranks, arguments)
    document["demo_s"] = say("make demo, installed", [demo_s() for _ in range(arguments.num_starts)]).rounded(1)
    document["load_at_end"] = round(os.getloadavg()[0], 1)
    print(json.dumps(document))


def parse(arguments: Sequence[str]) -> Arguments:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repeats: to see that it works")
    parser.add_argument("--config", default="laptop", help="a config file, or the name of a shipped one")
    return parser.parse_args(arguments, namespace=Arguments())


def versions() -> str:
    named = ", ".join(f"{name} {version(name)}" for name in ("torch", "ray", "diffusers"))
    return f"Python {platform.python_version()}, {named}"


def say(what: str, values: Sequence[float], unit: str = "s") -> Spread:
    spread = Spread.of(values)
    print(f"{what:58} {spread} {unit}", flush=True)
    return spread


def source(config: ServeConfig) -> str:
    return next(model.source for model in config.app.models if model.name == PICTURES)


def tell_bare(what: str, runs: Sequence[Times]) -> dict[str, Spread]:
    """Seconds from a request to its PNG in one process: with the plain module, and with the ranks' engine."""
    for name in runs[0]:
        for part in ("denoise", "decode"):
            say(f"{what}, {name}: {part}", [run[name][part] for run in runs])
    return {name: say(f"{what}, {name}: picture", [run[name]["total"] for run in runs]) for name in runs[0]}


def with_ranks(config: ServeConfig, num_ranks: int) -> ServeConfig:
    """``config`` with picture gangs of ``num_ranks`` ranks."""
    document = config.model_dump()
    for model in document["applications"][0]["args"]["models"]:
        if model["name"] == PICTURES:
            model["denoiser"]["num_ranks"] = num_ranks
    return parse_config(document)


def measure_ranks(config: ServeConfig, num_ranks: int, arguments: Arguments) -> dict[str, Any]:
    print(f"\n{num_ranks} ranks", flush=True)
    ready_s, results = [], {}
    for index in range(arguments.num_starts):
        with serving(with_ranks(config, num_ranks)) as application:
            ready_s.append(application.ready_s)
            if index == arguments.num_starts - 1:
                results = measure_pictures(application, source(config), arguments) | measure_footprint(application)
    return {"ready_s": say("from the command to ready", ready_s).rounded(1), **results}


def measure_pictures(application: Application, model: str, arguments: Arguments) -> dict[str, Any]:
    ask(application.url, PICTURES, num_clients=2, num_each=2, first_seed=900)  # warm-up
    alone, shares = in_turns(application, model, arguments.num_alone)
    together = ask(application.url, PICTURES, num_clients=NUM_CLIENTS, num_each=arguments.num_each, first_seed=100)
    return {"alone": shown(alone), "eight_clients": shown(together), "share_of_serving": shares}


def in_turns(application: Application, model: str, num_each: int) -> tuple[Load, dict[str, float]]:
    """One client's pictures, and the share of them that the same picture does not take in one process."""
    answers: list[Answer] = []
    bare_runs: list[Times] = []
    with bare(model) as draw:
        for seed in range(num_each):
            answers += ask(application.url, PICTURES, num_clients=1, num_each=1, first_seed=seed).answers
            bare_runs.append(draw())
    served_s = [answer.latency_s for answer in answers]
    tell_bare("bare in turns", bare_runs)
    shares = {}
    for name in bare_runs[0]:
        pairs = [100 * (1 - run[name]["total"] / one_s) for run, one_s in zip(bare_runs, served_s, strict=True)]
        shares[name] = round(say(f"share of serving in a picture, bare {name}", pairs, "%").median / 100, 3)
    return Load(answers=tuple(answers), num_clients=1, elapsed_s=sum(served_s)), shares


def shown(load: Load) -> dict[str, Any]:
    name = f"{load.num_clients} client{'s' if load.num_clients > 1 else ''}"
    stages = {stage: [answer.stages_s[stage] for answer in load.answers] for stage in STAGES}
    for stage, values in stages.items():
        say(f"{name}: {stage}", values)
    latency = say(f"{name}: picture, as the client sees it", [answer.latency_s for answer in load.answers])
    print(f"{f'{name}: pictures per second':58} {load.pictures_per_s:.2f}", flush=True)
    return {
        "latency_s": latency.rounded(),
        "stages_s": {stage: Spread.of(values).rounded() for stage, values in stages.items()},
        "pictures_per_s": round(load.pictures_per_s, 3),
    }


def measure_footprint(application: Application) -> dict[str, Any]:
    """Memory at rest, and its highest while eight clients draw and a clip is made; CPU at rest."""
    time.sleep(IDLE_S)
    idle_cores, idle = application.cpu_share(IDLE_S), application.memory()
    with peak_memory(application) as peaks:
        films = threading.Thread(target=clip, args=(application.url, CLIPS))
        films.start()
        ask(application.url, PICTURES, num_clients=NUM_CLIENTS, num_each=1, first_seed=500)
        films.join()
    peak = max(peaks, key=lambda memory: memory.pss_bytes)
    print(f"{'memory at rest / at most under load':58} {idle.pss_bytes / GIB:.2f} / {peak.pss_bytes / GIB:.2f} GiB")
    print(f"{'processes; cores in use at rest':58} {idle.num_processes}; {idle_cores:.2f}", flush=True)
    return {
        "memory_gib": {"idle": round(idle.pss_bytes / GIB, 2), "peak": round(peak.pss_bytes / GIB, 2)},
        "num_processes": idle.num_processes,
        "idle_cores": round(idle_cores, 3),
    }


@contextmanager
def peak_memory(application: Application) -> Iterator[list[Memory]]:
    """Memory every half second while the block runs."""
    seen, ended = [application.memory()], threading.Event()

    def watch() -> None:
        while not ended.wait(0.5):
            seen.append(application.memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield seen
    finally:
        ended.set()
        watcher.join()


if __name__ == "__main__":
    main()
