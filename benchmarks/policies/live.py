"""The same load live and simulated: what the application does under each policy, beside its plans gone through.

    python -m benchmarks.policies.live [--policies shortest,fair] [--mix laptop]
                                       [--rate 0.8 | --load 0.75 0.9 | --trace T]
                                       [--set denoiser.elastic=true] [--folder FOLDER --model FLUX.1-dev] [--out FILE]
                                       [--owners three | none]

Serves ``--config`` under each policy. What each class takes alone is measured before the first one, by stages, and
reused (``--alone``: what an earlier run of this or of ``benchmarks.load`` printed or kept); the others begin with a
request of each class. What the application itself measures and decides is kept from policy to policy (``--data-dir``:
and for the next run). The load is sent over HTTP, and the same arrivals go through ``benchmarks.policies.comparison``;
``--load`` is the share of the time in which the requests, one after the other, would keep everything busy; several are
sent to the same application one after the other. With the policy ``deadline`` requests must be done in ``--scale``
times what they take alone. Each comes with the API key of one of ``--owners``, whose weights the policy ``fair`` goes
by. ``--out`` is written after each load. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.load import alone as lone
from benchmarks.load.alone import Alone
from benchmarks.load.arrivals import Arrival, owned, poisson, trace, trace_file
from benchmarks.load.client import Outcome, send_all
from benchmarks.load.mix import Mix, RequestClass, load_mix
from benchmarks.load.owner import Owners, load_owners
from benchmarks.policies.comparison import Case, compared
from benchmarks.policies.shares import told as told_of_owners
from benchmarks.serving.application import Application, free_port, serving
from benchmarks.serving.settings import add_options, config_of, told_as, with_values
from deployments.cli.local import uses_proxies
from deployments.config import ServeConfig
from engines.gang.policies.policy import POLICIES, find_policy


def main(words: Sequence[str] | None = None) -> None:
    arguments = parse(words)
    with tempfile.TemporaryDirectory(prefix="troupe_bench_", dir="/tmp", ignore_cleanup_errors=True) as name:
        data_dir = arguments.data_dir or Path(name)
        data_dir.mkdir(parents=True, exist_ok=True)
        document = run(config_of(arguments), arguments.alone, data_dir, arguments)
    print(json.dumps(document), flush=True)


def classes_of(arguments: argparse.Namespace) -> Sequence[RequestClass]:
    """All of the mix, where a load is asked for; else those that come."""
    if arguments.load:
        return load_mix(arguments.mix).classes
    return tuple({one.kind.name: one.kind for one in arrivals_of(arguments, {})}.values())


def arrivals_of(
    arguments: argparse.Namespace, known: Mapping[str, Alone], load: float | None = None
) -> tuple[Arrival, ...]:
    """What comes; a ``load`` is one beside the lone times that are ``known``."""
    mix, seed = load_mix(arguments.mix), arguments.seed
    if arguments.trace:
        return owned(trace(mix, arguments.trace, seed), arguments.owners, seed)
    rate = load / mean_lone_s(mix, known) if load else arguments.rate
    return owned(poisson(mix, rate, arguments.duration_s, seed), arguments.owners, seed)


def mean_lone_s(mix: Mix, known: Mapping[str, Alone]) -> float:
    """Of a request that comes."""
    shares = [one.share for one in mix.classes]
    return sum(one.share * known[one.name].lone_s for one in mix.classes) / sum(shares)


def run(
    config: ServeConfig,
    known: Mapping[str, Alone],
    data_dir: Path,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """All policies, one after the other; what is there of it is kept as soon as it is."""
    told = next(name for name in ("trace", "load", "rate") if getattr(arguments, name))
    load = {told: str(arguments.trace) if told == "trace" else getattr(arguments, told)}
    document: dict[str, Any] = {"config": arguments.config, "set": arguments.set, "mix": arguments.mix, **load}
    document |= {"seed": arguments.seed, "scale": arguments.scale, "alone": lone.told(known), "rows": []}
    owners: Owners = arguments.owners

    def keep(alone: Mapping[str, Alone], row: dict[str, Any] | None = None) -> None:
        document["alone"] = lone.told(alone)
        if row is not None:
            document["rows"].append(row)
            print(json.dumps(row), flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(document))

    for policy in arguments.policies:
        port = free_port("127.0.0.1")
        served = owners.with_weights(with_values(config.with_metrics(port), [f"denoiser.policy={policy}"]))
        Case.of(served, policy, arguments.scale, known)  # what does not fit is said before anything starts
        with serving(served, data_dir, owners.keys) as application:
            visit = Visit(application, f"http://127.0.0.1:{port}/metrics", served, policy, owners.headers)
            known = visit.knowing(known, classes_of(arguments))
            keep(known)
            for offered in arguments.load or (None,):
                known, row = visit.sent(known, arrivals_of(arguments, known, offered), arguments.scale)
                keep(known, row | ({"offered": offered} if offered else {}))
                print(line(row), file=sys.stderr, flush=True)
    return document


class Visit:
    """An application under one policy."""

    def __init__(
        self, application: Application, metrics_url: str, config: ServeConfig, policy: str, headers: dict[str, str]
    ) -> None:
        self._application, self._metrics_url = application, metrics_url
        self._config, self._policy, self._headers = config, policy, headers

    def knowing(self, known: Mapping[str, Alone], kinds: Sequence[RequestClass]) -> dict[str, Alone]:
        """Returns what all classes take alone: those that nobody knows are measured, of the others each is asked for
        once. Begins when the application is at rest."""
        self._application.rest()
        url, old = self._application.url, [kind for kind in kinds if kind.name in known]
        asyncio.run(lone.made_ready(url, old, self._headers))
        new = [kind for kind in kinds if kind.name not in known]
        return {**known, **asyncio.run(lone.measured(url, self._metrics, new, self._headers))}

    def sent(
        self, known: Mapping[str, Alone], arrivals: Sequence[Arrival], scale: float
    ) -> tuple[dict[str, Alone], dict[str, Any]]:
        """Sends the load; returns what is known then, also of teams of other sizes, and what it came to."""
        due = Case.of(self._config, self._policy, scale, known).with_deadlines(arrivals)
        before = self._metrics()
        outcomes: list[Outcome] = asyncio.run(send_all(self._application.url, due, self._headers))
        after = self._metrics()
        known = lone.with_ratios(known, self._application.data_dir / "step_times")
        row = compared(Case.of(self._config, self._policy, scale, known), arrivals, outcomes, before, after)
        latest_s = round(max(one.late_s for one in outcomes), 4)
        ready_s = round(self._application.ready_s, 1)
        return known, {**row, "latest_send_s": latest_s, "ready_s": ready_s, "load": round(os.getloadavg()[0], 1)}

    def _metrics(self) -> str:
        url = self._metrics_url
        return httpx.get(url, timeout=30, trust_env=uses_proxies(url)).raise_for_status().text


def line(row: Mapping[str, Any]) -> str:
    """What matters of a policy, for people."""
    parts = [f"{row['policy']:10} {row['statuses']}"]
    for name in ("live", "as_alone", "as_in_run"):
        one = row[name]
        times = ", ".join(f"{point} {one['latency_s'].get(point, 0.0):.2f}" for point in ("mean", "p50", "p95"))
        parts.append(f"{name} {100 * one['attainment']:.1f} % in time, {times} s")
    parts.append(f"live by simulated {row['live_by_simulated']['as_in_run']}")
    return "; ".join((*parts, told_of_owners(row["owners"]["live"])))


def policies(told: str) -> list[str]:
    names = told.split(",")
    for name in names:
        find_policy(name)
    return names


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", type=told_as(policies), default=list(POLICIES))
    parser.add_argument("--mix", default="laptop", help="a YAML file of classes, or the name of a known one")
    parser.add_argument("--rate", type=float, default=0.8, help="requests a second, at random (Poisson)")
    parser.add_argument("--load", type=float, nargs="+", help="instead, in times what there is: 0.75")
    parser.add_argument("--duration-s", type=float, default=60.0)
    parser.add_argument(
        "--trace", type=told_as(trace_file), help='lines of {"at_s": 1, "class": "small"}, or a known name'
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scale", type=float, default=3.0, help="a deadline, in times the lone time")
    parser.add_argument(
        "--owners", type=told_as(load_owners), default="three", help="a file of them, the name of a known one, none"
    )
    lone.add_option(parser)
    parser.add_argument("--data-dir", type=Path, help="where what the application measures and decides is kept")
    parser.add_argument("--out", type=Path, help="where the document is kept, as far as it is")
    add_options(parser)
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
