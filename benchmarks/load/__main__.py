"""Open-loop load over HTTP: requests of several classes that come whether or not others were answered.

    python -m benchmarks.load [--mix laptop] [--rate 1.0 | --burst 20 --every-s 10 | --trace FILE] [--duration-s 60]
    python -m benchmarks.load --url http://host:8000 --metrics http://host:9464/metrics --mix pictures --rate 2 --gpus 2
    python -m benchmarks.load --config gpu2 --set denoiser.elastic=true --policies shortest,fair --load 0.75 0.9

Without ``--url`` it starts ``--config``, with ``--set`` and ``--folder`` (``benchmarks.serving.settings``), once under
each of ``--policies``. The application keeps measured times and decisions from policy to policy (with
``--data-dir`` also for the next run). A ``--load`` is the share of the time in which the requests, one after the other,
would keep the application busy; several are sent one after the other.

First the lone time of each class is measured, except for classes in ``--alone``. A deadline is ``--scale`` times that;
under the policy ``deadline`` requests carry it. A key is read from TROUPE_API_KEY. A server that is started here can be
asked with several keys, whose weights the policy ``fair`` follows (``--owners three``). ``--out`` is written after each
load. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from benchmarks.load import alone as lone
from benchmarks.load.alone import LoneTimes
from benchmarks.load.client import send_all
from benchmarks.load.mix import (
    Arrival,
    Mix,
    RequestClass,
    bursts,
    load_mix,
    load_owners,
    owned,
    poisson,
    trace,
    trace_file,
)
from benchmarks.load.summary import gpu_use, plot, print_classes, summary
from benchmarks.serving.application import free_port, serving
from benchmarks.serving.settings import add_options, argument_type, config_of, with_values
from deployments.cli.local import uses_proxies
from engines.gang.policies.policy import POLICIES, find_policy

OWN_POLICY = ""
"""The configuration's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    url: str
    metrics: str
    """URL of the metrics; "" without them."""
    num_gpus: int
    """Number of GPUs, or of ranks on CPUs."""
    headers: dict[str, str]
    is_new: bool = False
    """Started here, so sizes must be made ready."""


def main(words: Sequence[str] | None = None) -> None:
    arguments = parse(words)
    mix = load_mix(arguments.mix)
    if not arguments.load and not arrivals_of(mix, arguments, {}):
        sys.exit("no request comes in that time: raise --rate or --duration-s, or write some into the trace")
    with tempfile.TemporaryDirectory(prefix="troupe_bench_", dir="/tmp", ignore_cleanup_errors=True) as name:
        document = run(mix, arguments, arguments.data_dir or Path(name))
    print(json.dumps(document), flush=True)


def arrivals_of(mix: Mix, arguments: argparse.Namespace, lone_s: LoneTimes, load: float = 0.0) -> tuple[Arrival, ...]:
    """Return what comes. A ``load`` is one beside the lone times."""
    seed, duration_s = arguments.seed, arguments.duration_s
    if arguments.trace:
        arrivals = trace(mix, arguments.trace, seed)
    elif arguments.burst:
        arrivals = bursts(mix, arguments.burst, arguments.every_s, duration_s, seed)
    else:
        rate = load / mix.mean({one.name: lone_s[one.name] for one in mix.classes}) if load else arguments.rate
        arrivals = poisson(mix, rate, duration_s, seed)
    return owned(arrivals, arguments.owners, seed)


def classes_of(mix: Mix, arguments: argparse.Namespace) -> tuple[RequestClass, ...]:
    """Return all classes for a load, which depends on their lone times; otherwise those that arrive."""
    if arguments.load:
        return mix.classes
    come = {one.kind.name for one in arrivals_of(mix, arguments, {})}
    return tuple(one for one in mix.classes if one.name in come)


def run(mix: Mix, arguments: argparse.Namespace, data_dir: Path) -> dict[str, Any]:
    """Send every load under every policy. Return the document, which is one row, or has "rows"."""
    lone_s, classes, rows = dict(arguments.alone), classes_of(mix, arguments), list[dict[str, Any]]()
    data_dir.mkdir(parents=True, exist_ok=True)
    for policy in arguments.policies:
        with server(arguments, policy, data_dir) as target:
            if target.is_new:
                old = [one for one in classes if one.name in lone_s]
                asyncio.run(lone.measured(target.url, old, target.headers, num=0))
            new = [one for one in classes if one.name not in lone_s]
            lone_s |= asyncio.run(lone.measured(target.url, new, target.headers))
            print(f"alone: {lone_s}", file=sys.stderr, flush=True)
            for load in arguments.load or (0.0,):
                arrivals = arrivals_of(mix, arguments, lone_s, load)
                row = send(target, arrivals, lone_s, arguments, with_deadlines=policy == "deadline")
                rows.append(row | ({"policy": policy} if policy else {}) | ({"offered": load} if load else {}))
                document = {"alone": lone_s, "mix": arguments.mix, "seed": arguments.seed, "set": arguments.set}
                document |= rows[0] if arguments.is_single else {"rows": rows}
                if arguments.out:
                    arguments.out.write_text(json.dumps(document))
    return document


@contextmanager
def server(arguments: argparse.Namespace, policy: str, data_dir: Path) -> Iterator[Server]:
    """Yield the server of ``--url``, or one that is started and at rest."""
    if arguments.url:
        key = os.environ.get("TROUPE_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        url = arguments.url.rstrip("/").removesuffix("/v1")
        yield Server(url=url, metrics=arguments.metrics, num_gpus=arguments.gpus, headers=headers)
        return
    port, owners = free_port("127.0.0.1"), arguments.owners
    config = owners.with_weights(config_of(arguments).with_metrics(port))
    if policy:
        config = with_values(config, [f"denoiser.policy={policy}"])
    num_ranks = sum(model.denoiser.num_ranks * model.denoiser.num_replicas for model in config.app.models)
    with serving(config, data_dir, owners.keys) as application:
        application.rest()
        metrics = f"http://127.0.0.1:{port}/metrics"
        yield Server(url=application.url, metrics=metrics, num_gpus=num_ranks, headers=owners.headers, is_new=True)


def send(
    target: Server,
    arrivals: Sequence[Arrival],
    lone_s: LoneTimes,
    arguments: argparse.Namespace,
    *,
    with_deadlines: bool,
) -> dict[str, Any]:
    """Send the requests at their times. Return the summary of their outcomes."""
    limits_s = {name: arguments.scale * one_s for name, one_s in lone_s.items()}
    before = text_of(target.metrics)
    due = [with_deadline(one, limits_s[one.kind.name]) for one in arrivals] if with_deadlines else arrivals
    outcomes = asyncio.run(send_all(target.url, due, target.headers))
    row = summary(outcomes, lone_s, arguments.scale)
    if target.metrics:
        took_s = max(one.at_s + one.latency_s for one in outcomes)
        row |= gpu_use(before, text_of(target.metrics), took_s, target.num_gpus, row["right"])
    print_classes(row)
    if arguments.plot:
        plot(outcomes, lone_s, arguments.scale, arguments.plot)
    return row | {"load_at_end": round(os.getloadavg()[0], 1)}


def with_deadline(arrival: Arrival, limit_s: float) -> Arrival:
    body = {**arrival.kind.body, "deadline_s": limit_s}
    return replace(arrival, kind=arrival.kind.model_copy(update={"body": body}))


def text_of(metrics: str) -> str:
    if not metrics:
        return ""
    return httpx.get(metrics, timeout=30, trust_env=uses_proxies(metrics)).raise_for_status().text


def known_policies(names_with_commas: str) -> list[str]:
    names = names_with_commas.split(",")
    for name in names:
        find_policy(name)
    return names


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mix", default="laptop", help="a YAML file of classes, or the name of a known one")
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second, at random (Poisson)")
    parser.add_argument("--load", type=float, nargs="+", default=[], help="instead, as a share of capacity: 0.75")
    parser.add_argument("--burst", type=int, default=0, help="so many at once instead")
    parser.add_argument("--every-s", type=float, default=10.0, help="between two bursts")
    parser.add_argument(
        "--trace", type=argument_type(trace_file), help='lines of {"at_s": 1, "class": "small"}, or a known name'
    )
    parser.add_argument("--duration-s", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and classes")
    parser.add_argument("--scale", type=float, default=3.0, help="a deadline, in times the lone time")
    known = "a file, a known name, or none"
    parser.add_argument("--owners", type=argument_type(load_owners), default="none", help=known)
    known = f"one after the other, with commas between; known: {', '.join(POLICIES)}"
    parser.add_argument("--policies", type=argument_type(known_policies), default=[OWN_POLICY], help=known)
    lone.add_option(parser)
    add_options(parser)
    parser.add_argument("--data-dir", type=Path, help="where what the application measures and decides is kept")
    parser.add_argument("--url", default="", help="a server that runs")
    parser.add_argument("--metrics", default="", help="the URL of its metrics")
    parser.add_argument("--gpus", type=int, default=1, help="its number of GPUs")
    parser.add_argument("--plot", type=Path, help="file for a plot of latencies")
    parser.add_argument("--out", type=Path, help="file for the document, also of an unfinished run")
    arguments = parser.parse_args(words)
    arguments.is_single = len(arguments.policies) == 1 and len(arguments.load) <= 1
    if arguments.url and (arguments.owners.owners or arguments.policies != [OWN_POLICY]):
        parser.error("--owners and --policies need a server that is started here: --url has its own")
    if arguments.plot and not arguments.is_single:
        parser.error("--plot is for one policy and one load")
    return arguments


if __name__ == "__main__":
    main()
