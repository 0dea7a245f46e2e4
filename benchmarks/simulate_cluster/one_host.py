"""Real gangs of this host beside simulated ones: ``troupe serve`` with one model, under a load that rises and falls.

    python -m benchmarks.simulate_cluster.one_host FOLDER --gpus 2 --size 1024x1024 --steps 24
    python -m benchmarks.simulate_cluster.one_host flux-shapes --gpus 2 --size 64x64 --steps 12

Each gang has one GPU, or one CPU rank where there is no GPU. First come requests one by one, which start a gang from
zero and show what a picture takes. When that gang has ended, others come in a wave. Serve's controller logs when gangs
are ordered, ready and stopped. The simulation runs with the same arrivals and the measured times of steps and starts.
Figures are those of the wave. The last line is one JSON document with both runs and their ratios. Latencies agree only
where steps are even ("each_step_s" in "times"): busy cores make steps of CPU ranks several times as long.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import accumulate
from pathlib import Path

from benchmarks.load.client import FROM_S, Outcome
from benchmarks.load.mix import Arrival
from benchmarks.serving.application import Application, serving
from benchmarks.serving.settings import with_values
from benchmarks.simulate_cluster.comparison import (
    Comparison,
    Run,
    Setting,
    await_true,
    print_comparison,
    scaling_of,
    sent,
    simulated,
    step_times,
    two_lengths,
    waves,
)
from deployments.cli.configuration import config_for
from deployments.config import ServeConfig
from engines.gang.autoscaling import ScalingRules

EVENT = re.compile(
    r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) .*?(Starting |Stopping )?Replica\(id='(\w+)', deployment='Denoiser-[^']*'"
    r".*?\)( started successfully| \(currently)?"
)
"""A line of Serve's controller about a replica."""
FIRST = ("short", "short")
"""Classes of the first requests. The second shows what a picture takes."""
END_S = 120.0
"""Time for gangs without work to end."""


@dataclass(slots=True)
class GangTimes:
    """Unix times of a gang by Serve's controller."""

    ordered_s: float
    ready_s: float | None = None
    stopped_s: float | None = None


def gangs_of(lines: Iterable[str]) -> list[GangTimes]:
    """Return the gangs that lines of Serve's controller tell of, in order."""
    gangs: dict[str, GangTimes] = {}
    for line in lines:
        if (found := EVENT.search(line)) is None:
            continue
        moment, verb, name, what = found.groups()
        at_s = datetime.strptime(moment, "%Y-%m-%d %H:%M:%S,%f").timestamp()
        if verb == "Starting ":
            gangs[name] = GangTimes(at_s)
        elif verb == "Stopping ":
            gangs[name].stopped_s = at_s
        elif what == " started successfully":
            gangs[name].ready_s = at_s
    return list(gangs.values())


def moments_of(gangs: Sequence[GangTimes], begin_s: float) -> list[tuple[float, int, int]]:
    """Return each change of the number of running gangs, as ``Run.moments``. There are no nodes."""
    ran = [(gang.ready_s, gang.stopped_s) for gang in gangs if gang.ready_s is not None]
    changes = [(ready_s, 1) for ready_s, _ in ran] + [(end_s, -1) for _, end_s in ran if end_s is not None]
    ordered = sorted(changes)
    counts = accumulate(change for _, change in ordered)
    return [(0.0, 0, 0), *((at_s - begin_s, num, 0) for (at_s, _), num in zip(ordered, counts, strict=True))]


def gangs_in(logs: Path) -> list[GangTimes]:
    """Return the gangs in a Ray session's folder of logs."""
    return gangs_of(line for file in logs.glob("serve/controller_*.log") for line in file.read_text().splitlines())


def await_none(application: Application) -> None:
    """Wait until no gang is left."""
    await_true(lambda: all(gang.stopped_s is not None for gang in gangs_in(application.logs)), "gangs are left", END_S)


def first_requests(url: str, setting: Setting, begin_s: float) -> Iterator[tuple[Arrival, Outcome]]:
    """Send requests one by one. Yield each with its time after ``begin_s``."""
    for number, name in enumerate(FIRST):
        kind = setting.mix.named(name)
        at_s = time.time() + FROM_S - begin_s
        (outcome,) = sent(url, [Arrival(at_s=0.0, kind=kind, seed=number)])
        yield Arrival(at_s=at_s, kind=kind, seed=number), outcome


def measured(application: Application, setting: Setting, arguments: argparse.Namespace) -> Comparison:
    """Send all requests, wait until all gangs are gone, and simulate the same."""
    begin_s, url = time.time(), application.url
    first = list(first_requests(url, setting, begin_s))
    cold_s, lone_s = (one.latency_s for _, one in first)
    tell(f"ready after {application.ready_s:.0f} s, first request after {cold_s:.1f}, the same again {lone_s:.2f}")
    await_none(application)
    mean_s = lone_s / setting.steps[FIRST[-1]] * setting.mix.mean(setting.steps)
    wave = waves(
        setting.mix, mean_s, num=1, wave_s=arguments.wave_s, pause_s=0.0, load=arguments.load, seed=arguments.seed
    )
    wave_at_s = time.time() + FROM_S - begin_s
    tell(f"{len(wave)} requests within {arguments.wave_s:.0f} s")
    outcomes = [*(one for _, one in first), *sent(url, wave)]
    await_none(application)
    arrivals = [*(one for one, _ in first), *(replace(one, at_s=wave_at_s + one.at_s) for one in wave)]
    gangs = gangs_in(application.logs)
    starts_s = [gang.ready_s - gang.ordered_s for gang in gangs if gang.ready_s is not None]
    times = {"node_starts_s": [0.0], "gang_starts_s": starts_s, "node_idle_s": 0.0}
    times |= step_times(outcomes[len(FIRST) :], setting.steps)
    real = Run(
        latencies_s=[one.latency_s for one in outcomes], moments=moments_of(gangs, begin_s), num_starts=len(starts_s)
    )
    simulation = simulated(arrivals, times, setting)
    return Comparison(
        arrivals=arrivals[len(FIRST) :],
        times={**times, "first": [(one.at_s, one.kind.name) for one in arrivals[: len(FIRST)]], "wave_at_s": wave_at_s},
        real=real.after(wave_at_s, len(FIRST)),
        simulated=simulation.after(wave_at_s, len(FIRST)),
    )


def setting_of(arguments: argparse.Namespace, config: ServeConfig) -> Setting:
    (model,) = config.app.models
    body = {"model": model.name, "prompt": "a red circle", "size": arguments.size}
    rules = ScalingRules(target_wait_s=arguments.target_wait_s, min_gangs=0, max_gangs=arguments.gpus, idle_s=5.0)
    return Setting(mix=two_lengths(arguments.steps, **body), rules=rules, gangs_per_node=arguments.gpus)


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, or a shipped model")
    parser.add_argument("--gpus", type=int, default=2, help="gangs at most, of one GPU each (or one CPU rank)")
    parser.add_argument("--size", default="1024x1024")
    parser.add_argument("--steps", type=int, default=24, help="of 70 %% of the requests; others take 3 times as many")
    parser.add_argument("--target-wait-s", type=float, default=3.0)
    parser.add_argument("--wave-s", type=float, default=70.0)
    parser.add_argument("--load", type=float, default=1.5, help="gangs that the middle of the wave keeps busy")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--data-dir", help="folder for what is measured and decided; forgotten without one")
    parser.add_argument("--logs", help="folder for the application's logs")
    arguments = parser.parse_args()
    config = config_for(arguments.model, 1)
    setting = setting_of(arguments, config)
    scaling = ", ".join(f"{name}: {value}" for name, value in scaling_of(setting.rules).items())
    config = with_values(config, [f"denoiser.autoscaling={{{scaling}}}"])
    folders = [None if path is None else Path(path) for path in (arguments.data_dir, arguments.logs)]
    with serving(config, folders[0], keep_logs_in=folders[1]) as application:
        document = measured(application, setting, arguments).document()
    print_comparison(arguments, document)


if __name__ == "__main__":
    main()
