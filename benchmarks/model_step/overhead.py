"""Milliseconds of Python that a step costs a rank beside its forwards: the blocks before and after the transformer.

    python -m benchmarks.model_step.overhead [MODEL ...] [--jobs 5] [--out FILE]

MODEL is a published model or a folder. Its configurations are read, and predictions are drawn. The first pass of a step
records the forwards that its blocks ask for, one a branch of guidance. The second answers them and takes the solver's
step. Pictures and clips are tiny, so that Python takes the time. Counted is the thread's CPU time, which other programs
lengthen little; "clock_ms" is the wall clock. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.models.published import small_size
from benchmarks.results import tell
from benchmarks.timing import Times
from engines.core.model import Branch, DenoiserModel
from engines.parallel.division import shape_of
from pipelines.blocks.blank import blank_conditioning
from pipelines.blocks.opened import OpenedPipeline
from pipelines.blocks.sampler import BlocksSampler
from pipelines.checkpoint import Checkpoint

MODELS = ("FLUX.1-dev", "FLUX.2-dev", "Qwen-Image", "Wan2.1-T2V-14B", "LTX-2", "Cosmos3-Nano")
LIMIT_MS, MS_PER_S = 1.5, 1000

Step = dict[str, float]  # milliseconds by pass, and the number of branches


class Predictions:
    """Drawn values in the shapes of the transformers' answers, which a forward on the meta device gives."""

    def __init__(self, model: DenoiserModel) -> None:
        self._model = model
        self._known: dict[Any, Tensor] = {}

    def of(self, branch: Branch) -> Tensor:
        key = (branch.module, shape_of(branch))
        if key not in self._known:
            on_meta = {name: x.to("meta") if isinstance(x, Tensor) else x for name, x in branch.arguments.items()}
            shape = self._model.forward(self._model.modules[branch.module], on_meta).shape
            self._known[key] = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        return self._known[key]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--jobs", type=int, default=5, help="each of as many steps as the model takes")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    document: dict[str, Any] = {"machine": f"{platform.machine()}, {platform.system()}", "torch": torch.__version__}
    document |= {"python": platform.python_version(), "limit_ms": LIMIT_MS, "jobs": arguments.jobs}
    tell(document, (result_of(name, arguments.jobs) for name in arguments.models), arguments.out)


@torch.no_grad()
def result_of(name: str, num_jobs: int) -> dict[str, Any]:
    """Return the times of all steps of ``num_jobs`` jobs after a first one. ValueError for unknown names."""
    checkpoint = Checkpoint.of_configuration(name, "cpu", torch.float32)
    with torch.device("meta"):
        model = Checkpoint.of_configuration(name, "meta", torch.float32).outline()
    opened = OpenedPipeline(checkpoint.path, torch.device("cpu"), torch.float32)
    request = checkpoint.defaults.request(small_size(checkpoint.defaults))
    sampler, predictions = BlocksSampler(opened), Predictions(model)
    conditioning = blank_conditioning(opened, request, opened.max_tokens(checkpoint.defaults.max_tokens))
    steps: list[Step] = []
    for job in range(num_jobs + 1):
        of_job = list(steps_of(sampler, sampler.begin(request, conditioning), predictions))
        steps += of_job if job else []
    branches = max(step.pop("branches") for step in steps)
    times = {key: rounded(Times.of([step[key] for step in steps])) for key in steps[0]}
    is_within = times["step_ms"]["median_ms"] <= LIMIT_MS
    return {"model": name, "branches": branches, "within_limit": is_within, **times}


def steps_of(sampler: BlocksSampler, state: Any, predictions: Predictions) -> Iterator[Step]:
    """Run a job to its end. Drawing predictions is not counted."""
    for _ in range(sampler.num_steps(state)):
        branches, record_ms, record_clock_ms = timed(lambda state=state: sampler.branches(state))
        drawn = tuple(predictions.of(branch) for branch in branches)
        state, answer_ms, answer_clock_ms = timed(lambda state=state, drawn=drawn: sampler.advance(state, drawn))
        times = {"record_ms": record_ms, "answer_ms": answer_ms, "step_ms": record_ms + answer_ms}
        yield {"branches": len(branches), **times, "clock_ms": record_clock_ms + answer_clock_ms}


def timed(call: Callable[[], Any]) -> tuple[Any, float, float]:
    """Return the call's result, and its milliseconds of CPU time and of the clock."""
    clock_s, thread_s = time.perf_counter(), time.thread_time()
    result = call()
    return result, (time.thread_time() - thread_s) * MS_PER_S, (time.perf_counter() - clock_s) * MS_PER_S


def rounded(times: Times) -> dict[str, float]:
    return {name: round(value, 3) for name, value in asdict(times).items() if value is not None}


if __name__ == "__main__":
    main()
