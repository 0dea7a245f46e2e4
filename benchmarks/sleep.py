"""Models that share GPUs and take turns: mixed traffic, a killed rank, and requests for a sleeping model.

    python -m benchmarks.sleep application --ranks 2 --published FLUX.1-dev Z-Image Wan2.2-TI2V-5B --folders DIR

Published models have random weights; without ``--published`` the models of ``--config`` run, also on a CPU. The last
line is one JSON document.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import yaml

from benchmarks.application.client import Client, data_of
from benchmarks.faults.timeline import rank_pids, records_of
from benchmarks.results import status_of, tell
from benchmarks.serving.application import serving, wait_until
from benchmarks.serving.settings import with_values, write_model
from deployments.cli.configuration import config_for
from deployments.cli.serving import load_config, parse_config
from deployments.config import ServeConfig
from pipelines.checkpoint import Checkpoint

CASES = ("mixed", "kill", "swap")
Make = Callable[[str], tuple[bytes, float]]
"""Returns the file of a model's request, and the seconds that it took."""
ASLEEP_WITHIN_S = 60.0
POLL_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Alone:
    """Requests of a model that is awake, without others."""

    data: bytes
    took_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """Answers of a model in mixed traffic."""

    arrivals_s: list[float]
    """Seconds since the traffic began."""
    times_s: list[float]
    same_bytes: bool


def cases(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the results of ``--cases`` in their order. One that fails is a result with an error."""
    config = shared_config(arguments)
    defaults = {model.name: Checkpoint.open(model.source, weights=False).defaults for model in config.app.models}
    kinds = {name: one.kind for name, one in defaults.items() if one.takes_words_alone}
    with serving(config) as application, Client(application.url) as client:
        yield {"case": "start", "ready_s": application.ready_s}
        make = maker(client, kinds, arguments)
        expected = alone(make, [*kinds])
        yield {"case": "alone", "awake_s": {name: one.took_s for name, one in expected.items()}}
        of_case: dict[str, Callable[[], Iterable[dict[str, Any]]]] = {
            "mixed": lambda: [mixed(make, expected, arguments.seconds)],
            "kill": lambda: kills(make, expected, application.logs),
            "swap": lambda: swaps(make, expected, arguments.rounds),
        }
        for case in arguments.cases:
            try:
                yield from of_case[case]()
            except Exception as error:
                yield {"case": case, "error": repr(error)}


def maker(client: Client, kinds: Mapping[str, str], arguments: argparse.Namespace) -> Make:
    """Return a function that requests a model's picture or clip with its defaults, and one seed."""
    steps = {} if arguments.steps is None else {"num_inference_steps": arguments.steps}
    words = (word.partition("=") for word in arguments.clip)
    of_clips = {name: yaml.safe_load(value) for name, _, value in words}

    def make(model: str) -> tuple[bytes, float]:
        begun_s = time.perf_counter()
        answer = client.make(kinds[model], model=model, **steps, **(of_clips if kinds[model] == "video" else {}))
        return data_of(answer), time.perf_counter() - begun_s

    return make


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
    args["shares"] = {"bench": {} if arguments.memory_gib is None else {"memory_gib": arguments.memory_gib}}
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


def alone(make: Make, models: Sequence[str]) -> dict[str, Alone]:
    """Return the third of three requests of each model: weights are awake and shapes warm."""
    found = {}
    for model in models:
        data, took_s = [make(model) for _ in range(3)][-1]
        found[model] = Alone(data=data, took_s=took_s)
    return found


def swaps(make: Make, expected: Mapping[str, Alone], rounds: int) -> Iterator[dict[str, Any]]:
    """Yield seconds of a request after one for the same model, and after one for each of the others."""
    for name in expected:
        same, awake_s, asleep_s = True, [], []
        for _ in range(rounds):
            for other in [one for one in expected if one != name]:
                make(other)
                data, took_s = make(name)
                asleep_s.append(took_s)
                same = same and data == expected[name].data
            data, took_s = make(name)
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


def mixed(make: Make, expected: Mapping[str, Alone], seconds: float) -> dict[str, Any]:
    """Send requests to all models, one after the other for each, with pauses up to twice a request's time.

    ``wait_s`` is the mean time beyond that of a request alone. ``wait_in_parts_s`` is the same for the same arrivals,
    calculated, if each model had a gang for its part of the time and none otherwise (``in_parts``).
    """
    begin_s = time.monotonic()

    def follow(name: str) -> Answers:
        pauses, arrivals_s, times_s, same = random.Random(name), [], [], True
        while (arrival_s := time.monotonic() - begin_s) < seconds:
            data, took_s = make(name)
            arrivals_s.append(arrival_s)
            times_s.append(took_s)
            same = same and data == expected[name].data
            time.sleep(pauses.uniform(0, 2 * took_s))
        return Answers(arrivals_s=arrivals_s, times_s=times_s, same_bytes=same)

    with ThreadPoolExecutor(len(expected)) as pool:
        answers = dict(zip(expected, pool.map(follow, expected), strict=True))
    return {"case": "mixed", "seconds": seconds, **summary_of(answers, expected, seconds)}


def summary_of(answers: Mapping[str, Answers], expected: Mapping[str, Alone], seconds: float) -> dict[str, Any]:
    """Return means and counts by model. All models have answers."""
    parts_s = {
        name: in_parts(one.arrivals_s, expected[name].took_s, number, len(answers), seconds)
        for number, (name, one) in enumerate(answers.items())
    }
    return {
        "mean_s": {name: fmean(one.times_s) for name, one in answers.items()},
        "longest_s": {name: max(one.times_s) for name, one in answers.items()},
        "wait_s": {name: fmean(one.times_s) - expected[name].took_s for name, one in answers.items()},
        "wait_in_parts_s": {name: fmean(times_s) - expected[name].took_s for name, times_s in parts_s.items()},
        "num_requests": {name: len(one.times_s) for name, one in answers.items()},
        "same_bytes": all(one.same_bytes for one in answers.values()),
    }


def in_parts(arrivals_s: Sequence[float], work_s: float, number: int, num: int, period_s: float) -> list[float]:
    """Return the latencies of requests of ``work_s`` each to a gang that runs in part ``number`` of ``num`` equal ones.

    Parts repeat with ``period_s``. Requests run in order of arrival, and continue in the next part of their gang.
    Starts of gangs cost nothing here.
    """
    part_s, free_s, latencies_s = period_s / num, 0.0, []
    for arrival_s in arrivals_s:
        now_s, left_s = max(arrival_s, free_s), work_s
        period = math.floor(now_s / period_s)
        while left_s > 0:
            begin_s = period * period_s + number * part_s
            now_s = max(now_s, begin_s)
            ran_s = min(left_s, max(0.0, begin_s + part_s - now_s))
            now_s, left_s, period = now_s + ran_s, left_s - ran_s, period + 1
        free_s = now_s
        latencies_s.append(now_s - arrival_s)
    return latencies_s


def kills(make: Make, expected: Mapping[str, Alone], logs: Path) -> Iterator[dict[str, Any]]:
    """Kill -9 a rank of each model while the model sleeps, ask all models at once, and yield the results."""
    for name in expected:
        make(next(other for other in expected if other != name))
        was_asleep, before = _sleeps(logs, name), rank_pids(logs, name)
        os.kill(before[-1], signal.SIGKILL)
        with ThreadPoolExecutor(len(expected)) as pool:
            answers = dict(zip(expected, pool.map(make, expected), strict=True))
        yield {
            "case": "kill -9 of a rank",
            "model": name,
            "was_asleep": was_asleep,
            "later_s": {other: took_s - expected[other].took_s for other, (_, took_s) in answers.items()},
            "new_gang": not {*rank_pids(logs, name)} & {*before},
            "same_bytes": all(data == expected[other].data for other, (data, _) in answers.items()),
        }


def _sleeps(logs: Path, model: str) -> bool:
    """Wait until the model's gang sleeps. Return False if it does not in time, since all models fit together."""

    def is_asleep() -> bool:
        phases = [record.get("phase") for record in records_of(logs) if record.get("model") == model]
        return [one for one in phases if one in ("gang: sleep", "gang: wake")][-1:] == ["gang: sleep"]

    return wait_until(is_asleep, ASLEEP_WITHIN_S, POLL_S)


def machine() -> dict[str, Any]:
    """Return the GPUs of the host and the version of torch."""
    query = ["nvidia-smi", "--query-gpu=name,pcie.link.gen.current,pcie.link.width.current", "--format=csv,noheader"]
    try:
        gpus = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")
    except OSError:
        gpus = []
    return {"gpus": [gpu for gpu in gpus if gpu], "torch": torch.__version__}


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["application"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--config", default="laptop")
    parser.add_argument("--ranks", type=int, default=1, help="of published models")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE")
    parser.add_argument("--published", nargs="+", default=[], help="published models, with random weights")
    parser.add_argument("--folders", type=Path, default=Path("out/models"), help="where they lie or are written")
    parser.add_argument("--memory-gib", type=float, help="of each GPU for the models")
    parser.add_argument("--steps", type=int, help="of each request; the models' own by default")
    parser.add_argument("--clip", nargs="+", default=[], metavar="KEY=VALUE", help="fields of requests for clips")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES, help="what is measured, in this order")
    parser.add_argument("--seconds", type=float, default=60.0, help="of mixed traffic")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse(words)
    document = {"part": "application", "published": arguments.published, **machine()}
    tell(document, cases(arguments), arguments.out)
    return status_of(document["results"])


if __name__ == "__main__":
    sys.exit(main())
