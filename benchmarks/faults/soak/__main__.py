"""A thousand requests while processes are killed at random and clients go away: what becomes of each.

    python -m benchmarks.faults.soak [--policy shortest] [--requests 1000] [--kill-every-s 20] [--seed 1]

Starts the laptop's configuration with ``--policy`` and three API keys, asks for each picture and clip once in peace,
then for pictures, streams, edits and clips side by side. One client in five goes away, and now and then fifteen come at
once of which none stays. Every request must be answered with the bytes of peace, or refused with a reason; who hears
neither may only be one whose connection died with the process that carried it. When it is over, all must be well by
itself: health, processes, clips, no job left behind. Ends with 1 if anything was lost. The last line is one JSON
document.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import math
import os
import random
import sys
import threading
import time
from typing import Any

import httpx
import psutil

from benchmarks.faults.kills import KINDS, Killer
from benchmarks.faults.soak.clients import Clients
from benchmarks.faults.soak.peace import Peace, num_processes
from benchmarks.faults.soak.storm import draw_references, ride_out, summary
from benchmarks.faults.soak.visits import drawn_turns
from benchmarks.serving.application import free_port, serving
from deployments.cli.local import uses_proxies
from deployments.cli.serving import load_config, parse_config
from deployments.config import ServeConfig
from engines.gang.policies.policy import POLICIES

KEYS = ("ann", "bob", "cid")
RANKS_AND_REPLICAS = tuple(kind for kind in KINDS if kind not in ("proxy", "controller", "haproxy"))


def main() -> None:
    arguments = parse()
    port = free_port("127.0.0.1")
    config = with_policy(load_config(arguments.config).with_metrics(port), arguments.policy, arguments.api_replicas)
    os.environ["TROUPE_API_KEYS"] = ",".join(KEYS)
    load = os.getloadavg()[0]
    with serving(config) as application:
        run = soak(application.url, f"http://127.0.0.1:{port}/metrics", application.process, KEYS, arguments)
        document = asyncio.run(run)
    document |= {"load_at_start": round(load, 1), "load_at_end": round(os.getloadavg()[0], 1)}
    for line in (*document["lost"], *document["unsettled"]):
        print(line)
    print(json.dumps(document))
    sys.exit(1 if document["lost"] or document["unsettled"] else 0)


def with_policy(config: ServeConfig, policy: str, num_api_replicas: int = 1) -> ServeConfig:
    """Returns ``config`` with that policy in every gang, and so many replicas of the API."""
    document = config.model_dump(mode="json")
    args = document["applications"][0]["args"]
    args["api"]["num_replicas"] = num_api_replicas
    for model in args["models"]:
        model["denoiser"]["policy"] = policy
    return parse_config(document)


async def soak(
    url: str, metrics_url: str, server: psutil.Process, keys: tuple[str, ...], arguments: argparse.Namespace
) -> dict[str, Any]:
    """The storm and the peace after it, at an application that runs among the children of ``server``."""
    turns = drawn_turns(arguments.requests, arguments.policy, len(keys), arguments.seed)
    killer = Killer(
        server=server,
        every_s=arguments.kill_every_s,
        rng=random.Random(arguments.seed),
        kinds=RANKS_AND_REPLICAS if arguments.kinds is None else arguments.kinds.split(","),
    )
    no_limit = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=no_limit, trust_env=uses_proxies(url)) as http:
        clients = Clients(http=http, keys=keys, hang_s=arguments.hang_s)
        await draw_references(clients)
        before, over = num_processes(server), threading.Event()
        killing = threading.Thread(target=killer.go_on, args=(over,))
        killing.start()
        began_s = time.monotonic()
        try:
            say = functools.partial(print, flush=True)
            outcomes = await ride_out(clients, turns, arguments.at_once, say, arguments.within_s)
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
    parser.add_argument("--policy", default="shortest", choices=tuple(POLICIES))
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=12, help="clients that ask side by side")
    parser.add_argument("--kill-every-s", type=float, default=20.0, help="on average")
    parser.add_argument("--kinds", help=f"what is killed; by default {','.join(RANKS_AND_REPLICAS)}")
    parser.add_argument("--hang-s", type=float, default=300.0, help="a request that takes longer hangs")
    parser.add_argument("--within-s", type=float, default=math.inf, help="no request begins after that")
    parser.add_argument("--api-replicas", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1, help="of requests, and of what is killed when")
    parser.add_argument("--config", default="laptop", help="a config file, or the name of a shipped one")
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
