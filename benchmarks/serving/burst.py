"""Many pictures asked for at once: how long a full server takes to refuse, and whether what it takes comes out right.

    python -m benchmarks.serving.burst [--requests 500] [--bursts 3] [--config laptop]

Starts the application, draws one picture, and then asks for that picture ``--requests`` times at once, burst after
burst, while another client asks ``GET /health``. Each picture has to have the bytes of the first, each refusal the
shape of the API with a ``Retry-After``. The last line is one JSON document. Reports: benchmarks/reports/serving_*.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from benchmarks.serving.application import serving
from benchmarks.serving.bare import PROMPT
from deployments.cli.serving import load_config

IMAGES = "/v1/images/generations"
BODY = {"prompt": PROMPT, "seed": 1}
REFUSALS = (429, 503)
HEALTH_EVERY_S = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """``status`` 0 is a connection that ended without one."""

    status: int
    headers: dict[str, str]
    body: bytes
    took_s: float

    @property
    def picture(self) -> str:
        return str(json.loads(self.body)["data"][0]["b64_json"])

    @property
    def is_refusal(self) -> bool:
        """Whether this is a refusal as the API's documentation has it."""
        if self.status not in REFUSALS or int(self.headers.get("retry-after", "0")) < 1:
            return False
        return set(json.loads(self.body)["error"]) == {"message", "type", "param", "code"}


async def exchange(url: str, method: str, path: str, body: bytes = b"") -> Answer:
    """One request on a connection of its own. Without an HTTP library, 500 of which at once would cost seconds here."""
    parts = urlsplit(url)
    head = f"{method} {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n" if body else "\r\n"
    start_s, raw = time.perf_counter(), b""
    try:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.write(head.encode() + body)
        raw = await reader.read()
        writer.close()
    except ConnectionError as error:
        print(f"{method} {path}: {error}")
    top, _, content = raw.partition(b"\r\n\r\n")
    first, *lines = top.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    status = int(first.split()[1]) if first else 0
    return Answer(status=status, headers=headers, body=content, took_s=time.perf_counter() - start_s)


async def ask_health(url: str, seen: list[Answer]) -> None:
    while True:
        seen.append(await exchange(url, "GET", "/health"))
        await asyncio.sleep(HEALTH_EVERY_S)


async def burst(url: str, num: int, picture: str) -> dict[str, Any]:
    """Asks for ``num`` pictures at once, and says what came back."""
    health: list[Answer] = []
    asking = asyncio.create_task(ask_health(url, health))
    body = json.dumps(BODY).encode()
    answers = await asyncio.gather(*(exchange(url, "POST", IMAGES, body) for _ in range(num)))
    asking.cancel()
    made = [answer for answer in answers if answer.status == 200]
    refused = [answer for answer in answers if answer.is_refusal]
    document = {
        "right": sum(answer.picture == picture for answer in made),
        "refused": len(refused),
        "statuses": dict(sorted(Counter(answer.status for answer in answers).items())),
        "refusal_s": percentiles([answer.took_s for answer in refused]),
        "picture_s": percentiles([answer.took_s for answer in made]),
        "health_s": percentiles([answer.took_s for answer in health]),
        "health_statuses": dict(Counter(answer.status for answer in health)),
        "retry_after_s": percentiles([float(answer.headers["retry-after"]) for answer in refused]),
    }
    print(document, flush=True)
    return document


def percentiles(values: Sequence[float]) -> dict[str, float]:
    if len(values) < 2:
        return {}
    return {
        "median": round(statistics.median(values), 3),
        "p95": round(statistics.quantiles(values, n=20)[-1], 3),
        "highest": round(max(values), 3),
    }


async def bursts(url: str, num_requests: int, num_bursts: int) -> list[dict[str, Any]]:
    body = json.dumps(BODY).encode()
    first = [await exchange(url, "POST", IMAGES, body) for _ in range(3)]  # the first ones are slower
    assert len({answer.picture for answer in first}) == 1, "a seed gives the same bytes"
    return [await burst(url, num_requests, first[0].picture) for _ in range(num_bursts)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--bursts", type=int, default=3)
    parser.add_argument("--config", default="laptop", help="a config file, or the name of a shipped one")
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    with serving(load_config(arguments.config).with_metrics(None)) as application:
        results = asyncio.run(bursts(application.url, arguments.requests, arguments.bursts))
    load_at_end = round(os.getloadavg()[0], 1)
    print(json.dumps({"num_requests": arguments.requests, "bursts": results, "load_at_end": load_at_end}))
    num_answers = sum(one["right"] + one["refused"] for one in results)
    sys.exit(0 if num_answers == arguments.requests * arguments.bursts else 1)


if __name__ == "__main__":
    main()
