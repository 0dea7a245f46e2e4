"""The application under random kills of its processes, with pictures, streams and clips going on.

    python -m benchmarks.faults [--minutes 10] [--seed 0] [--every-s 20]

Starts the laptop's configuration, draws references, then kills and stops processes of every kind, also such as are just
starting. In the end all must be well by itself. Tells lost clips, wrong bytes, requests that took over a minute, and
answers that are not in the API's shape; ends with 1 if there are any. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import threading
import time
from typing import Any

import httpx

from benchmarks.faults.kills import Killer
from benchmarks.faults.traffic import NUM_SEEDS, Tally, Traffic
from benchmarks.serving.application import Application, serving
from deployments.cli.local import uses_proxies
from deployments.cli.serving import load_config

HEALTHY_WITHIN_S = 300.0
CLIPS_WITHIN_S = 600.0
CLIP_EVERY_S = 15.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0, help="of what is killed when")
    parser.add_argument("--every-s", type=float, default=20.0, help="between two kills, on average")
    parser.add_argument("--hang-s", type=float, default=60.0, help="a request that takes longer hangs")
    parser.add_argument("--config", default="laptop", help="a config file, or the name of a shipped one")
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    with serving(load_config(arguments.config)) as application:
        document = run(application, arguments)
    print(json.dumps(document))
    sys.exit(1 if any(document[name] for name in ("lost_clips", "wrong_bytes", "hangs", "outside_shape")) else 0)


def run(application: Application, arguments: argparse.Namespace) -> dict[str, Any]:
    tally = Tally(hang_s=arguments.hang_s)
    traffic = Traffic(url=application.url, tally=tally, references={})
    draw_references(traffic)
    killer = Killer(server=application.process, every_s=arguments.every_s, rng=random.Random(arguments.seed))
    over = threading.Event()
    asked = (traffic.picture, traffic.picture, traffic.stream)
    threads = [threading.Thread(target=traffic.go_on, args=(over, ask)) for ask in asked]
    threads += [
        threading.Thread(target=make_clips, args=(traffic, over)),
        threading.Thread(target=killer.go_on, args=(over,)),
    ]
    for thread in threads:
        thread.start()
    time.sleep(60 * arguments.minutes)
    over.set()
    for thread in threads:
        thread.join()
    healthy_s = healthy_after_s(application.url)
    end_s = time.monotonic() + CLIPS_WITHIN_S
    ends = {video_id: traffic.clip_of(video_id, end_s) for video_id in tally.clips}
    return report(killer, tally, ends, healthy_s)


def draw_references(traffic: Traffic) -> None:
    """Raises AssertionError if a picture or clip cannot be made before anything was killed."""
    for seed in range(NUM_SEEDS):
        traffic.picture(seed)
        traffic.clip(seed)
    end_s = time.monotonic() + CLIPS_WITHIN_S
    ends = [traffic.clip_of(video_id, end_s) for video_id in traffic.tally.clips]
    assert ends == ["right"] * NUM_SEEDS, ends
    assert traffic.tally.outcomes["picture right"] == NUM_SEEDS, traffic.tally.outcomes
    traffic.tally.outcomes.clear()
    traffic.tally.hangs.clear()
    traffic.tally.clips.clear()


def make_clips(traffic: Traffic, until: threading.Event) -> None:
    seed = 0
    while not until.wait(CLIP_EVERY_S):
        traffic.clip(seed % NUM_SEEDS)
        seed += 1


def healthy_after_s(url: str) -> float | None:
    """How long ``GET /health`` takes to be 200 again; None if it is not in time."""
    started_s = time.monotonic()
    while time.monotonic() - started_s < HEALTHY_WITHIN_S:
        try:
            if httpx.get(f"{url}/health", timeout=10.0, trust_env=uses_proxies(url)).status_code == httpx.codes.OK:
                return round(time.monotonic() - started_s, 1)
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    return None


def report(killer: Killer, tally: Tally, ends: dict[str, str], healthy_s: float | None) -> dict[str, Any]:
    lost = {video_id: end for video_id, end in ends.items() if end not in ("right", "wrong_bytes")}
    num_wrong = sum(count for name, count in tally.outcomes.items() if name.endswith("wrong_bytes"))
    document = {
        "kills": dict(killer.kills),
        "requests": dict(sorted(tally.outcomes.items())),
        "clips": len(ends),
        "lost_clips": len(lost),
        "wrong_bytes": num_wrong + list(ends.values()).count("wrong_bytes"),
        "hangs": len(tally.hangs),
        "outside_shape": sum(count for name, count in tally.outcomes.items() if name.endswith("outside_shape")),
        "healthy_after_s": healthy_s,
        "load_at_end": round(os.getloadavg()[0], 1),
    }
    for line in (*tally.examples, *(f"lost {video_id}: {end}" for video_id, end in lost.items()), *tally.hangs):
        print(line)
    return document


if __name__ == "__main__":
    main()
