"""The application with models that share GPUs: mixed traffic, a killed rank, and requests for a sleeping model."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml

from benchmarks.serving.application import serving
from benchmarks.serving.settings import with_values, write_model
from benchmarks.sleep import traffic
from deployments.cli.configuration import config_for
from deployments.cli.local import http_client
from deployments.cli.serving import load_config, parse_config
from deployments.config import ServeConfig
from pipelines.checkpoint import Checkpoint

PROMPT = "a red circle"
POLL_S = 0.02
TIMEOUT_S = 600.0


def cases(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the results of ``--cases`` in their order. One that fails is a result with an error."""
    config = shared_config(arguments)
    defaults = {model.name: Checkpoint.open(model.source, weights=False).defaults for model in config.app.models}
    kinds = {name: one.kind for name, one in defaults.items() if one.takes_words_alone}
    with serving(config) as application, client_of(application.url) as client:
        yield {"case": "start", "ready_s": application.ready_s}
        make = Requests(client, kinds, arguments).made
        expected = traffic.alone(make, [*kinds])
        yield {"case": "alone", "awake_s": {name: one.took_s for name, one in expected.items()}}
        of_case: dict[str, Callable[[], Iterable[dict[str, Any]]]] = {
            "mixed": lambda: [traffic.mixed(make, expected, arguments.seconds)],
            "kill": lambda: traffic.kills(make, expected, application.logs),
            "swap": lambda: traffic.swaps(make, expected, arguments.rounds),
        }
        for case in arguments.cases:
            try:
                yield from of_case[case]()
            except Exception as error:
                yield {"case": case, "error": repr(error)}


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
