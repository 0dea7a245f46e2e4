"""The application with models that share GPUs: what a request for a sleeping model waits, and mixed traffic."""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, median
from typing import Any

import httpx
import yaml

from benchmarks.serving.application import serving
from benchmarks.serving.settings import with_values, write_model
from deployments.cli.configuration import config_for
from deployments.cli.local import http_client
from deployments.cli.serving import load_config, parse_config
from deployments.config import ServeConfig
from pipelines.checkpoint import Checkpoint

PROMPT = "a red circle"
POLL_S = 0.02
TIMEOUT_S = 600.0


def cases(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the times to a request for a model awake and asleep, then those of mixed traffic."""
    config = shared_config(arguments)
    defaults = {model.name: Checkpoint.open(model.source, weights=False).defaults for model in config.app.models}
    kinds = {name: one.kind for name, one in defaults.items() if one.takes_words_alone}
    with serving(config) as application, client_of(application.url) as client:
        yield {"case": "start", "ready_s": application.ready_s}
        requests = Requests(client, kinds, arguments)
        files = {name: requests.made(name)[0] for name in kinds for _ in range(2)}
        yield from swaps(requests, files, arguments.rounds)
        yield mixed(requests, files, arguments.seconds)


def client_of(url: str) -> httpx.Client:
    return http_client(url, base_url=url, timeout=TIMEOUT_S)


def shared_config(arguments: argparse.Namespace) -> ServeConfig:
    """Return ``--config`` with its models in one share group, or one group of the models of ``--published``.

    Published models have the settings of ``troupe serve MODEL`` on ``--ranks`` GPUs. They are written to ``--folders``
    with random weights if they are not there.
    """
    if arguments.published:
        document = document_of([published(name, arguments) for name in arguments.published])
    else:
        document = with_values(load_config(arguments.config), arguments.set).model_dump(mode="json")
    args = document["applications"][0]["args"]
    for model in args["models"]:
        model["share"] = "bench"
    limits = {"memory_gib": arguments.memory_gib, "host_memory_gib": arguments.pinned_gib}
    args["shares"] = {"bench": {name: value for name, value in limits.items() if value is not None}}
    return parse_config(document)


def published(name: str, arguments: argparse.Namespace) -> ServeConfig:
    folder: Path = arguments.folders / name
    if not folder.exists():
        write_model(name, folder)
    return with_values(config_for(str(folder.resolve()), arguments.ranks), arguments.set)


def document_of(configs: Sequence[ServeConfig]) -> dict[str, Any]:
    """Return a document with the models of ``configs``, whose encoders and decoders share what ranks leave of a GPU."""
    document = configs[0].model_dump(mode="json")
    models = [config.model_dump(mode="json")["applications"][0]["args"]["models"][0] for config in configs]
    for model in models:
        ranks_take = model["denoiser"]["gpus_per_rank"]
        share = math.floor(1000 * (1 - ranks_take) / (2 * len(models))) / 1000 if ranks_take else 0.0
        model["text_encoder"]["num_gpus"] = model["decoder"]["num_gpus"] = share
        model["decoder"]["num_devices"] = 1
    document["applications"][0]["args"]["models"] = models
    return document


class Requests:
    """Requests with the models' defaults, and one seed."""

    def __init__(self, client: httpx.Client, kinds: Mapping[str, str], arguments: argparse.Namespace) -> None:
        self._client, self._kinds = client, kinds
        self._body = {"prompt": PROMPT, "seed": 1}
        if arguments.steps is not None:
            self._body["num_inference_steps"] = arguments.steps
        words = (word.partition("=") for word in arguments.clip)
        self._clip_fields = {name: yaml.safe_load(value) for name, _, value in words}

    def made(self, model: str) -> tuple[bytes, float]:
        """Return the file, and the seconds that it took."""
        begun_s = time.perf_counter()
        data = self._clip(model) if self._kinds[model] == "video" else self._picture(model)
        return data, time.perf_counter() - begun_s

    def _picture(self, model: str) -> bytes:
        answer = self._post("/v1/images/generations", {"model": model, **self._body})
        return bytes(answer["data"][0]["b64_json"], "ascii")

    def _clip(self, model: str) -> bytes:
        clip = self._post("/v1/videos", {"model": model, **self._body, **self._clip_fields})
        while (state := self._client.get(f"/v1/videos/{clip['id']}").json())["status"] not in ("completed", "failed"):
            time.sleep(POLL_S)
        if state["status"] == "failed":
            raise RuntimeError(f"{model}: {state}")
        return self._client.get(f"/v1/videos/{clip['id']}/content").raise_for_status().content

    def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the JSON of the answer. RuntimeError with its text if it is an error."""
        answer = self._client.post(path, json=body)
        if answer.is_error:
            raise RuntimeError(f"{body['model']}: {answer.status_code} {answer.text}")
        document: dict[str, Any] = answer.json()
        return document


def swaps(requests: Requests, files: Mapping[str, bytes], rounds: int) -> Iterator[dict[str, Any]]:
    """Yield seconds of a request after one for the same model, and after one for each of the others."""
    for name in files:
        same, awake_s, asleep_s = True, [], []
        for _ in range(rounds):
            for other in [one for one in files if one != name]:
                requests.made(other)
                data, took_s = requests.made(name)
                asleep_s.append(took_s)
                same = same and data == files[name]
            data, took_s = requests.made(name)
            awake_s.append(took_s)
        yield {
            "case": "swap",
            "model": name,
            "awake_s": median(awake_s),
            "asleep_s": median(asleep_s),
            "later_s": median(asleep_s) - median(awake_s),
            "latest_s": max(asleep_s) - median(awake_s),
            "same_bytes": same,
        }


def mixed(requests: Requests, files: Mapping[str, bytes], seconds: float) -> dict[str, Any]:
    """Send requests to all models, one after the other for each, with pauses up to twice a request's time."""
    end_s = time.monotonic() + seconds

    def follow(name: str) -> tuple[list[float], bool]:
        pauses, times_s, same = random.Random(name), [], True
        while time.monotonic() < end_s:
            data, took_s = requests.made(name)
            times_s.append(took_s)
            same = same and data == files[name]
            time.sleep(pauses.uniform(0, 2 * took_s))
        return times_s, same

    with ThreadPoolExecutor(len(files)) as pool:
        found = dict(zip(files, pool.map(follow, files), strict=True))
    return {
        "case": "mixed",
        "seconds": seconds,
        "mean_s": {name: fmean(times_s) for name, (times_s, _) in found.items()},
        "longest_s": {name: max(times_s) for name, (times_s, _) in found.items()},
        "num_requests": {name: len(times_s) for name, (times_s, _) in found.items()},
        "same_bytes": all(same for _, same in found.values()),
    }
