"""Open-loop load over HTTP: requests of several classes that come when they will, and how long each takes.

    python -m benchmarks.load [--mix laptop] [--rate 1.0 | --burst 20 --every-s 10 | --trace FILE] [--duration-s 60]
    python -m benchmarks.load --url http://host:8000 --metrics http://host:9464/metrics --mix pictures --rate 2 --gpus 2

Without ``--url`` it starts ``--config``, with ``--set`` and ``--folder`` (``benchmarks.serving.settings``). What each
class takes alone is measured first, but for what ``--alone`` says of it (what an earlier run of this or of
``benchmarks.policies.live`` printed or kept); a deadline is ``--scale`` times that. A key is read from TROUPE_API_KEY;
a server that is started here can be asked with several (``--owners three``). The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.load import alone as lone
from benchmarks.load.arrivals import Arrival, bursts, owned, poisson, trace, trace_file
from benchmarks.load.client import Outcome, send_all
from benchmarks.load.mix import Mix, load_mix
from benchmarks.load.owner import load_owners
from benchmarks.load.summary import gpu_use, plot, summary
from benchmarks.serving.application import free_port, serving
from benchmarks.serving.settings import add_options, config_of, told_as
from deployments.cli.local import uses_proxies


def main(words: Sequence[str] | None = None) -> None:
    arguments = parse(words)
    mix = load_mix(arguments.mix)
    arrivals = owned(arrivals_of(mix, arguments), arguments.owners, arguments.seed)
    if not arrivals:
        sys.exit("no request comes in that time: raise --rate or --duration-s, or write some into the trace")
    with server(arguments) as (url, metrics, num_gpus):
        document = asyncio.run(measured(url, metrics, num_gpus, mix, arrivals, arguments))
    document |= {"mix": arguments.mix, "seed": arguments.seed, "load_at_end": round(os.getloadavg()[0], 1)}
    print(json.dumps(document), flush=True)


def arrivals_of(mix: Mix, arguments: argparse.Namespace) -> tuple[Arrival, ...]:
    if arguments.trace:
        return trace(mix, arguments.trace, arguments.seed)
    if arguments.burst:
        return bursts(mix, arguments.burst, arguments.every_s, arguments.duration_s, arguments.seed)
    return poisson(mix, arguments.rate, arguments.duration_s, arguments.seed)


@contextmanager
def server(arguments: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    """The URLs of the API and of its metrics ("" for none), and the number of GPUs (on the CPU: ranks)."""
    if arguments.url:
        yield arguments.url.rstrip("/").removesuffix("/v1"), arguments.metrics, arguments.gpus
        return
    port = free_port("127.0.0.1")
    config = arguments.owners.with_weights(config_of(arguments).with_metrics(port))
    num_ranks = sum(model.denoiser.num_ranks * model.denoiser.num_replicas for model in config.app.models)
    with serving(config, keys=arguments.owners.keys) as application:
        application.rest()
        yield application.url, f"http://127.0.0.1:{port}/metrics", num_ranks


async def measured(
    url: str, metrics: str, num_gpus: int, mix: Mix, arrivals: tuple[Arrival, ...], arguments: argparse.Namespace
) -> dict[str, Any]:
    key = os.environ.get("TROUPE_API_KEY")
    headers = arguments.owners.headers or ({"Authorization": f"Bearer {key}"} if key else {})
    new = [one for one in mix.classes if one.name not in arguments.alone]
    known = {**arguments.alone, **await lone.measured(url, lambda: text_of(metrics), new, headers)}
    lone_s = {one.name: known[one.name].lone_s for one in mix.classes}
    print(f"alone: {lone_s}", file=sys.stderr, flush=True)
    before = text_of(metrics)
    outcomes = await send_all(url, arrivals, headers)
    document = summary(outcomes, lone_s, arguments.scale) | {"alone": lone.told(known)}
    if metrics:
        took_s = max(one.at_s + one.latency_s for one in outcomes)
        document |= gpu_use(before, text_of(metrics), took_s, num_gpus, document["right"])
    say(document)
    if arguments.plot:
        plot(outcomes, lone_s, arguments.scale, arguments.plot)
    if arguments.outcomes:
        write(outcomes, arguments.outcomes)
    return document


def text_of(metrics: str) -> str:
    if not metrics:
        return ""
    return httpx.get(metrics, timeout=30, trust_env=uses_proxies(metrics)).raise_for_status().text


def say(document: dict[str, Any]) -> None:
    for name, found in document["classes"].items():
        latency = found["latency_s"]
        told = ", ".join(f"{point} {value:.2f}" for point, value in latency.items()) or "none answered"
        share = f"{100 * found['attainment']:.0f} % within {document['deadline_scale']:g} x {found['lone_s']:.2f} s"
        wrong = f"ETA wrong by {100 * found['eta']['median_error']:.0f} %" if found["eta"]["told"] else "no ETA"
        work = f"{found['gpu_s']['mean']:.2f} GPU-s a {found['kind']}" if found["gpu_s"] else "no GPU-s"
        parts = (f"{name:12} {found['right']:4} of {found['requests']:4}", told, share, wrong, work)
        print("  ".join(parts), file=sys.stderr, flush=True)


def write(outcomes: list[Outcome], path: Path) -> None:
    fields = ("name", "at_s", "late_s", "latency_s", "status", "stages_ms", "eta_s", "gpu_s")
    lines = [json.dumps({field: getattr(one, field) for field in fields}) for one in outcomes]
    path.write_text("\n".join(lines) + "\n")


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mix", default="laptop", help="a YAML file of classes, or the name of a known one")
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second, at random (Poisson)")
    parser.add_argument("--burst", type=int, default=0, help="so many at once instead")
    parser.add_argument("--every-s", type=float, default=10.0, help="between two bursts")
    parser.add_argument(
        "--trace", type=told_as(trace_file), help='lines of {"at_s": 1, "class": "small"}, or a known name'
    )
    parser.add_argument("--duration-s", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and classes")
    parser.add_argument("--scale", type=float, default=3.0, help="a deadline, in times the lone time")
    parser.add_argument("--owners", type=told_as(load_owners), default="none", help="a file, a known name, or none")
    lone.add_option(parser)
    add_options(parser)
    parser.add_argument("--url", default="", help="a server that runs")
    parser.add_argument("--metrics", default="", help="the URL of its metrics")
    parser.add_argument("--gpus", type=int, default=1, help="its number of GPUs")
    parser.add_argument("--plot", type=Path, help="a picture of it")
    parser.add_argument("--outcomes", type=Path, help="every request, as lines of JSON")
    arguments = parser.parse_args(words)
    if arguments.url and arguments.owners.owners:
        parser.error("--owners needs a server that is started here: --url has keys of its own")
    return arguments


if __name__ == "__main__":
    main()
