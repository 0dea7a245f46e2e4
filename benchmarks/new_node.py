"""Start of a gang on a new node beside its restart on a node that has run it.

    python -m benchmarks.new_node flux-shapes --ranks 1
    python -m benchmarks.new_node FOLDER --ranks 1 --repeats 3 [--set KEY=VALUE] [--out FILE]

All nodes are Ray nodes of this host. The head runs the API, the encoder and the decoder. A second node runs the gang,
which scales to zero when it is idle, and starts again for the next request. The first start has empty caches, and
``--repeats`` others a warm node. Then that node ends, and a new one takes its place, ``--repeats`` times. A new node
has empty folders for all that processes cache, and the cluster's shared cache of kernels and decisions. It imports
libraries before the request, as the commands of a cluster file make it do. Two more new nodes lack one of these: the
imports, or the shared cache. The model is a folder or a shipped one, with the settings of ``troupe serve MODEL``.

A start lasts from Serve's order for a replica until the gang is ready. A node's own start does not count: the request
is sent ``REST_S`` after the node has joined. Libraries and weights are in the host's page cache each time. A table of
the slowest start on a new node goes to stderr. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.application.client import Client, data_of
from benchmarks.faults.timeline import Record, rank_pids, records_of, seconds
from benchmarks.results import status_of, tell
from benchmarks.serving.application import await_gang_end
from benchmarks.serving.nodes import Cluster, Node, serving_on_nodes
from benchmarks.serving.settings import with_values
from benchmarks.sweep.whole import phases_of
from deployments.app import REPLICA_CPUS
from deployments.cli.configuration import config_for
from deployments.config import ServeConfig

FIRST, AGAIN, NEW = "first of all", "warm node", "new node"
COLD, ALONE = "new node without imports", "new node without the shared cache"
FROM_ZERO = "denoiser.autoscaling={min_replicas: 0, max_replicas: 1, target_wait_s: 10, idle_s: 2}"
LOAD = "gang: load"
"""The phase in which ranks read weights."""
ORDER = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) .*Starting Replica\(.*deployment='Denoiser-")
"""A line of Serve's controller."""
REST_S = 20.0
"""Until a node that has joined is at rest: its processes import libraries."""


class Starts:
    """Starts of the gang of ``config`` on nodes of a cluster, each for the same picture or clip."""

    def __init__(self, cluster: Cluster, client: Client, config: ServeConfig) -> None:
        self._cluster, self._client = cluster, client
        (model,) = config.app.models
        self._name, gang = model.name, model.denoiser
        self._num_cpus = math.ceil(gang.num_ranks * gang.cpus_per_rank + REPLICA_CPUS)
        self._num_gpus = math.ceil(gang.num_ranks * gang.gpus_per_rank)
        self._expected: bytes | None = None

    def node(self, *, is_warm: bool = True, **variables: str) -> Node:
        node = self._cluster.add(num_cpus=self._num_cpus, num_gpus=self._num_gpus, variables=variables)
        if is_warm:
            node.warm()
        time.sleep(REST_S)
        return node

    def measured(self, where: str) -> dict[str, Any]:
        """Ask for the picture where no gang runs, and wait until the gang is gone again."""
        begun_s, clock_s = time.time(), time.perf_counter()
        answer = self._client.film() if self._makes_clips else self._client.paint()
        answered_s = time.perf_counter() - clock_s
        data = data_of(answer)
        self._expected = self._expected or data
        records = [record for record in records_of(self._cluster.logs) if seconds(record) > begun_s]
        found = start_of(records, orders_of(self._cluster.logs), begun_s)
        await_gang_end(rank_pids(self._cluster.logs, self._name))
        return {"case": where, "answered_s": round(answered_s, 2), **found, "same_bytes": data == self._expected}

    @cached_property
    def _makes_clips(self) -> bool:
        return bool(self._client.card()["kind"] == "video")


def cases(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield each start, then the summary."""
    config, num_cpus = config_of(arguments)
    with (
        tempfile.TemporaryDirectory(prefix="troupe_shared_", dir="/tmp") as shared,
        serving_on_nodes(config, num_cpus=num_cpus, num_gpus=arguments.ranks, shared=Path(shared)) as cluster,
        Client(cluster.url, arguments.side) as client,
    ):
        starts = Starts(cluster, client, config)
        found: list[dict[str, Any]] = []
        for one in each_start(starts, arguments.repeats):
            found.append(one)
            yield one
    print(phase_table(found), file=sys.stderr)
    yield {"case": "summary", **summary_of(found)}


def each_start(starts: Starts, num_repeats: int) -> Iterator[dict[str, Any]]:
    node = starts.node()
    yield starts.measured(FIRST)
    for _ in range(num_repeats):
        yield starts.measured(AGAIN)
    for _ in range(num_repeats):
        node.end()
        node = starts.node()
        yield starts.measured(NEW)
    node.end()
    node = starts.node(is_warm=False)
    yield starts.measured(COLD)
    node.end()
    starts.node(TROUPE_KERNEL_CACHE="")
    yield starts.measured(ALONE)


def config_of(arguments: argparse.Namespace) -> tuple[ServeConfig, int]:
    """Return the configuration, and the CPUs of a head that holds all of it but its gang.

    A rank asks for more CPUs than the head has. They are numbers for Ray, and no limits.
    """
    model = str(Path(arguments.model).resolve()) if Path(arguments.model).is_dir() else arguments.model
    config = config_for(model, arguments.ranks)
    (only,) = config.app.models
    stages = only.text_encoder.num_cpus + only.decoder.num_cpus
    num_cpus = math.ceil(config.app.api.num_cpus + stages) + 1
    own = [f"denoiser.cpus_per_rank={num_cpus + 1}", FROM_ZERO]
    return with_values(config, [*own, *arguments.set]), num_cpus


def orders_of(logs: Path) -> list[float]:
    """Return the Unix times at which Serve ordered a replica of a denoiser, in order."""
    lines = [line for file in logs.glob("serve/controller_*.log") for line in file.read_text().splitlines()]
    times = [found[1] for line in lines if (found := ORDER.search(line))]
    return sorted(datetime.strptime(one, "%Y-%m-%d %H:%M:%S,%f").timestamp() for one in times)


def start_of(records: Sequence[Record], orders: Sequence[float], begun_s: float) -> dict[str, Any]:
    """Return the seconds of the one start after ``begun_s``, whole and by phase. RuntimeError if there is none, or two.

    "until_order_s": the request until Serve's order; "start_s": the order until the gang is ready; "until_process_s":
    the order until the replica's process begins; "phases_s": as ``phases_of``.
    """
    own = [one for one in orders if one > begun_s]
    ready = [seconds(record) for record in records if record["message"] == "gang is ready"]
    begins = [seconds(record) - record["took_s"] for record in records if record.get("phase") == "replica: process"]
    if not len(own) == len(ready) == len(begins) == 1:
        raise RuntimeError(f"one start expected; orders {own}, processes {begins}, gangs that were ready {ready}")
    return {
        "until_order_s": round(own[0] - begun_s, 2),
        "until_process_s": round(begins[0] - own[0], 2),
        "start_s": round(ready[0] - own[0], 2),
        "phases_s": phases_of(records),
    }


def phase_table(starts: Sequence[Mapping[str, Any]]) -> str:
    """Return the seconds of each phase of the slowest start on a new node, beside the median of those on a warm one.

    The phase that has lost most comes first. Phases overlap: their sum is not the start. The last row is the start.
    """
    slowest = max((one for one in starts if one["case"] == NEW), key=lambda one: one["start_s"])
    warm = [one for one in starts if one["case"] == AGAIN]
    rows = [(name, median(one["phases_s"].get(name, 0.0) for one in warm), took_s)
            for name, took_s in slowest["phases_s"].items()]  # fmt: skip
    rows.sort(key=lambda row: row[1] - row[2])
    rows.append(("start", median(one["start_s"] for one in warm), slowest["start_s"]))
    width = max(len(name) for name, *_ in rows)
    lines = [f"{name:{width}} {before:10.2f} {now:10.2f} {now - before:+10.2f}" for name, before, now in rows]
    return "\n".join([f"{'phase, s':{width}} {AGAIN:>10} {NEW:>10} {'difference':>10}", *lines])


def summary_of(starts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the median start of each case, with and without weights, and the ratios of new nodes to the warm one."""
    names = list(dict.fromkeys(one["case"] for one in starts))
    whole = {name: median(one["start_s"] for one in starts if one["case"] == name) for name in names}
    apart = {
        name: median(one["start_s"] - one["phases_s"][LOAD] for one in starts if one["case"] == name) for name in names
    }
    return {
        "start_s": {name: round(value, 2) for name, value in whole.items()},
        "without_weights_s": {name: round(value, 2) for name, value in apart.items()},
        "ratio": {name: round(value / whole[AGAIN], 2) for name, value in whole.items()},
        "ratio_without_weights": {name: round(value / apart[AGAIN], 2) for name, value in apart.items()},
        "same_bytes": all(one["same_bytes"] for one in starts),
    }


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, or the name of a shipped model")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3, help="starts on the warm node, and new nodes")
    parser.add_argument("--side", type=int, default=0, help="of pictures, in pixels; 0: the model's size")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="of the model")
    parser.add_argument("--out", type=Path, help="file for the document, also of an unfinished run")
    arguments = parser.parse_args(words)
    if arguments.repeats < 1:
        parser.error(f"--repeats is {arguments.repeats}: the summary compares at least one start of each kind")
    return arguments


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse(words)
    document: dict[str, Any] = {"model": arguments.model, "ranks": arguments.ranks, "set": arguments.set}
    tell(document, cases(arguments), arguments.out)
    return status_of(document["results"])


if __name__ == "__main__":
    sys.exit(main())
