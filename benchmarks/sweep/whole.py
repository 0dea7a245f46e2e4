"""One model behind ``troupe serve``: its first picture or clip, the same again, and one made of pictures."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks.application.client import PROMPT, Client, data_of, noise, timing
from benchmarks.application.memory import samples_of
from benchmarks.faults.timeline import Record, records_of
from benchmarks.serving.application import Application, serving
from benchmarks.sweep.loop import SweepRequest
from deployments.cli.serving import parse_config
from deployments.config import ServeConfig
from engines.core import logs
from pipelines.checkpoint import Checkpoint
from pipelines.defaults import Defaults
from pipelines.size import Size

NUM_REPEATS = 2
EVERY_S = 0.5
MEMORY_QUERY = ("nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader,nounits")
CAPTURED = "captured a step"
"""Line of a rank's log."""


def measured(folder: Path, ranks: int, settings: SweepRequest, turn: AbstractContextManager[Any]) -> dict[str, Any]:
    """Return the application's own times in milliseconds. The requests run inside ``turn``.

    Raises:
        RuntimeError: It does not make one of the pictures or clips.
    """
    defaults = Checkpoint(folder).defaults
    with serving(config_of(folder, ranks)) as application, memory_of(application) as peak:
        with turn, Client(application.url) as client:
            found = answers_of(client, defaults, settings)
        records = records_of(application.logs)
        ready_s = round(application.ready_s, 1)
    messages = {str(record["message"]) for record in records}
    return {
        "through": "application",
        "ready_s": ready_s,
        "phases_s": phases_of(records),
        **found,
        "captured": CAPTURED in messages,
        "gpu_gib": peak,
    }


def phases_of(records: Iterable[Record]) -> dict[str, float]:
    """Return the seconds of each phase of the start, in the process where it took longest."""
    phases = sorted((record["took_s"], record["phase"]) for record in records if record["message"] == logs.MESSAGE)
    return {phase: took_s for took_s, phase in phases}


@contextmanager
def memory_of(application: Application) -> Iterator[dict[str, float]]:
    """Yield the "highest" number of GiB that ``application`` holds on one GPU during the block; nothing without GPUs.

    Memory of other programs does not count. The number is there after the block.
    """
    peak: dict[str, float] = {}

    def look() -> int:
        held_mib = held_mib_by_gpu({process.pid for process in application.processes()}, MEMORY_QUERY)
        return max(held_mib.values(), default=0)

    with samples_of(look, EVERY_S) as seen_mib:
        yield peak
    if most_mib := max(seen_mib):
        peak["highest"] = round(most_mib / 1024, 2)


def held_mib_by_gpu(pids: Set[int], query: Sequence[str]) -> dict[str, int]:
    """Return MiB that the processes ``pids`` hold, by GPU, as ``query`` reports; nothing where it cannot run."""
    try:
        said = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError):
        return {}
    held = Counter[str]()
    for gpu, pid, mib in (line.split(", ") for line in said.splitlines()):
        if int(pid) in pids and mib.isdigit():
            held[gpu] += int(mib)
    return held


def answers_of(client: Client, defaults: Defaults, settings: SweepRequest) -> dict[str, Any]:
    steps, size = settings.steps_of(defaults), settings.size_of(defaults)
    counts = {"first": defaults.min_pictures, "pictures": max(defaults.min_pictures, 1)}
    plain = [made(client, defaults, steps, size, counts["first"]) for _ in range(1 + NUM_REPEATS)]
    first, *again = map(timing, plain)
    fastest = min(again, key=lambda one: one["denoise"])
    found: dict[str, Any] = {
        "size": str(size),
        "steps": steps,
        "first_ms": first,
        "again_ms": fastest,
        "step_ms": round(fastest["denoise"] / steps, 1),
        "same_bytes": len({data_of(one) for one in plain}) == 1,
        "bytes": len(data_of(plain[0])),
    }
    if defaults.max_pictures and not defaults.min_pictures:
        found["with_picture_ms"] = timing(made(client, defaults, steps, size, counts["pictures"]))
    return found


def made(
    client: Client, defaults: Defaults, steps: int, size: Size, num_pictures: int, prompt: str = PROMPT
) -> httpx.Response:
    """Return a picture or a clip, of as many pictures of noise. RuntimeError says what came instead."""
    frames = {"num_frames": size.num_frames} if defaults.kind == "video" else {}
    fields = {"prompt": prompt, "num_inference_steps": steps, "size": f"{size.width}x{size.height}", **frames}
    return client.make(defaults.kind, [noise(size.width, size.height)] * num_pictures, **fields)


def config_of(folder: Path, ranks: int) -> ServeConfig:
    """Return a configuration of one gang; on GPUs encoder and decoder share the first one's memory with a rank."""
    on_gpu = torch.cuda.is_available()
    share: dict[str, Any] = {"num_cpus": 1, "num_gpus": 0.1, "num_threads": 4} if on_gpu else {}
    gang: dict[str, Any] = {"num_ranks": ranks, "engine": "torch", "start_deadline_s": 900}
    if on_gpu:
        gang |= {"gpus_per_rank": 0.8, "cpus_per_rank": 2, "threads_per_rank": 4, "step_deadline_s": 300}
    else:
        gang |= {"cpus_per_rank": 0.1, "strategy": "ulysses", "ping_deadline_s": 30}
    model = {"name": "swept", "path": str(folder.resolve()), "denoiser": gang}
    apart = {"dtype": "bfloat16", "text_encoder": share, "decoder": share}
    model |= apart if on_gpu else {"stages": "together"}
    return parse_config({"http_options": {"port": 0}, "applications": [application_of([model])]})


def application_of(models: Sequence[Any]) -> dict[str, Any]:
    args = {"models": list(models), "metrics": {"port": None}}
    return {"name": "troupe", "route_prefix": "/", "import_path": "deployments.app:build_app", "args": args}
