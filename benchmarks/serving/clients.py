"""HTTP clients that ask for pictures, one after the other or several at once."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain

import httpx

from benchmarks.serving.bare import PROMPT
from deployments.cli.local import http_client

STAGES = ("queue", "encode", "denoise", "decode", "total")
TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """``latency_s`` as the client sees it; ``stages_s`` as the server says."""

    latency_s: float
    stages_s: dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """``num_clients`` clients, each with one request after the other."""

    answers: tuple[Answer, ...]
    num_clients: int
    elapsed_s: float

    @property
    def pictures_per_s(self) -> float:
        return len(self.answers) / self.elapsed_s


def ask(url: str, model: str, *, num_clients: int, num_each: int, first_seed: int) -> Load:
    """Each request has a seed and a prompt of its own, from ``first_seed`` on: encoders keep what they made of one."""

    def one_client(index: int) -> list[Answer]:
        first = first_seed + index * num_each
        with http_client(url, base_url=url, timeout=TIMEOUT_S) as client:
            return [picture(client, model, seed) for seed in range(first, first + num_each)]

    started_s = time.perf_counter()
    with ThreadPoolExecutor(max_workers=num_clients) as pool:
        answers = tuple(chain.from_iterable(pool.map(one_client, range(num_clients))))
    return Load(answers=answers, num_clients=num_clients, elapsed_s=time.perf_counter() - started_s)


def picture(client: httpx.Client, model: str, seed: int) -> Answer:
    started_s = time.perf_counter()
    body = {"model": model, "prompt": f"{PROMPT}, number {seed}", "seed": seed}
    response = client.post("/v1/images/generations", json=body)
    latency_s = time.perf_counter() - started_s
    response.raise_for_status()
    return Answer(latency_s=latency_s, stages_s=stages(response.headers["server-timing"]))


def stages(header: str) -> dict[str, float]:
    """Seconds by stage of a ``Server-Timing`` header."""
    return {name: milliseconds / 1000 for name, milliseconds in stages_ms(header).items()}


def stages_ms(header: str) -> dict[str, float]:
    """The same in milliseconds. Nothing of an answer without the header."""
    entries = (entry.strip().split(";dur=") for entry in header.split(",") if entry)
    return {name: float(value) for name, value in entries}


def clip(url: str, model: str) -> None:
    """One clip, from the request to its end."""
    with http_client(url, base_url=url, timeout=TIMEOUT_S) as client:
        body = {"model": model, "prompt": "a green triangle moves from left to right on a black background"}
        job = client.post("/v1/videos", json=body).raise_for_status().json()
        while job["status"] in ("queued", "in_progress"):
            time.sleep(0.5)
            job = client.get(f"/v1/videos/{job['id']}").raise_for_status().json()
        assert job["status"] == "completed", job
