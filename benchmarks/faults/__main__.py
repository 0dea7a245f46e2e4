"""The application under random kills, with clients that go away: the outcome of each request.

    python -m benchmarks.faults [--minutes 10] [--requests 1000] [--policy shortest] [--every-s 20] [--seed 1]

Starts the laptop's configuration with ``--policy`` and three API keys. Asks for each picture and clip once while all is
well, then kills and stops processes of every kind, also ones that are just starting, while clients ask for pictures,
streams, edits and clips side by side. One client in five goes away, and now and then fifteen come at once and none
stays. Every request must be answered with the same bytes, or refused with a reason. A connection may end without an
answer only if the process that carried it died. In the end all must be well by itself: health, processes, clips, no job
left behind. The status is 1 if anything was lost. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import random
import sys
import threading
import time
from typing import Any

import httpx
import psutil

from benchmarks.faults.clients import Clients, drawn_turns
from benchmarks.faults.kills import KINDS, Killer
from benchmarks.faults.storm import Peace, draw_references, num_processes, ride_out, summary
from benchmarks.serving.application import free_port, serving
from benchmarks.serving.settings import with_values
from deployments.cli.local import uses_proxies
from deployments.cli.serving import load_config, parse_config
from deployments.config import ServeConfig
from engines.gang.policies.policy import POLICIES

KEYS = ("ann", "bob", "cid")
HANG_S = 300.0
"""A request that takes longer hangs."""
KILLED = tuple(kind for kind in KINDS if kind != "haproxy")


def main() -> None:
    arguments = parse()
    port, load = free_port("127.0.0.1"), os.getloadavg()[0]
    config = with_policy(load_config(arguments.config).with_metrics(port), arguments.policy, arguments.api_replicas)
    with serving(config, keys=KEYS) as application:
        run = soak(application.url, f"http://127.0.0.1:{port}/metrics", application.process, KEYS, arguments)
        document = asyncio.run(run)
    document |= {"load_at_start": round(load, 1), "load_at_end": round(os.getloadavg()[0], 1)}
    for line in (*document["lost"], *document["unsettled"]):
        print(line)
    print(json.dumps(document))
    sys.exit(1 if document["lost"] or document["unsettled"] else 0)


def with_policy(config: ServeConfig, policy: str, num_api_replicas: int = 1) -> ServeConfig:
    """Return ``config`` with that policy in every gang, and that many replicas of the API."""
    document = with_values(config, [f"denoiser.policy={policy}"]).model_dump(mode="json")
    document["applications"][0]["args"]["api"]["num_replicas"] = num_api_replicas
    return parse_config(document)


async def soak(
    url: str, metrics_url: str, server: psutil.Process, keys: tuple[str, ...], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Run the storm and the peace after it, at an application that runs among the children of ``server``."""
    turns = drawn_turns(arguments.requests, arguments.policy, len(keys), arguments.seed)
    killer = Killer(
        server=server, every_s=arguments.every_s, rng=random.Random(arguments.seed), kinds=arguments.kinds.split(",")
    )
    no_limit = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=no_limit, trust_env=uses_proxies(url)) as http:
        clients = Clients(http=http, keys=keys, hang_s=HANG_S)
        await draw_references(clients)
        before, over = num_processes(server), threading.Event()
        killing = threading.Thread(target=killer.go_on, args=(over,))
        killing.start()
        began_s = time.monotonic()
        try:
            say = functools.partial(print, flush=True)
            outcomes = await ride_out(clients, turns, arguments.at_once, say, 60 * arguments.minutes)
        finally:
            over.set()
            await asyncio.to_thread(killing.join)
        took_s = time.monotonic() - began_s
        peace = Peace(clients=clients, metrics_url=metrics_url, server=server, before=before)
        unsettled = await peace.broken()
    return {
        "policy": arguments.policy,
        "seed": arguments.seed,
        **summary(outcomes, killer.struck),
        "kills": dict(sorted(killer.kills.items())),
        "unsettled": unsettled,
        "took_s": round(took_s, 1),
        "settled_after_s": round(time.monotonic() - began_s - took_s, 1),
    }


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="no request begins after that")
    parser.add_argument("--requests", type=int, default=20_000, help="at most")
    parser.add_argument("--policy", default="shortest", choices=tuple(POLICIES))
    parser.add_argument("--at-once", type=int, default=12, help="clients that ask side by side")
    parser.add_argument("--every-s", type=float, default=20.0, help="between two kills, on average")
    parser.add_argument(
        "--kinds", default=",".join(KILLED), help=f"processes that are killed; by default {','.join(KILLED)}"
    )
    parser.add_argument("--api-replicas", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1, help="of requests, and of what is killed when")
    parser.add_argument("--config", default="laptop", help="a config file, or the name of a shipped one")
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
