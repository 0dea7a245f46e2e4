"""Milliseconds that a step costs a rank beside its forwards: the blocks before the transformer, and those after it.

    python -m benchmarks.model_step.overhead [MODEL ...] [--jobs 5] [--out FILE]

MODEL is a published model or a folder, of which configurations alone are read: predictions are drawn. The first of a
step's two passes notes the forwards that its blocks ask for, one a branch of guidance; the second answers them and
takes the solver's step. Pictures and clips are tiny, so that it is Python that takes the time. Counted is the time that
the thread had a processor, which other programs lengthen little, and beside it the clock's. The last line is one JSON
document.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
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
LIMIT_MS = 1.5
"""What a step may cost a rank."""
MS_PER_S = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Milliseconds on a processor for the two passes, and on the clock for both."""

    num_branches: int
    note_ms: float
    answer_ms: float
    clock_ms: float

    @property
    def both_ms(self) -> float:
        return self.note_ms + self.answer_ms


class Predictions:
    """Drawn values in the shapes that the transformers answer in, which a forward without values tells."""

    def __init__(self, model: DenoiserModel) -> None:
        self._model = model
        self._known: dict[Hashable, Tensor] = {}

    def of(self, branch: Branch) -> Tensor:
        key = (branch.module, shape_of(branch))
        if key not in self._known:
            on_meta = {name: _on_meta(value) for name, value in branch.arguments.items()}
            shape = self._model.forward(self._model.modules[branch.module], on_meta).shape
            self._known[key] = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        return self._known[key]


def main() -> None:
    arguments = parse()
    torch.set_num_threads(1)
    results = []

    def told() -> Iterator[dict[str, Any]]:
        for name in arguments.models:
            results.append(result_of(name, arguments.jobs))
            yield results[-1]

    document: dict[str, Any] = {
        "machine": f"{platform.machine()}, {platform.system()}",
        "python": platform.python_version(),
    }
    document |= {"torch": torch.__version__, "limit_ms": LIMIT_MS, "jobs": arguments.jobs}
    tell(document, tabled(told(), results), arguments.out)


def tabled(results: Iterable[dict[str, Any]], known: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Passes ``results`` on, and prints the table of them all after the last."""
    yield from results
    print(table(known))


def table(results: Iterable[dict[str, Any]]) -> str:
    head = "| model | branches | noting | answering | both: median / 90 % | on the clock | at most "
    lines = [f"{head}{LIMIT_MS} ms |", "|---|---|---|---|---|---|---|"]
    for result in results:
        note, answer, both, clock = (result[name] for name in ("note_ms", "answer_ms", "step_ms", "clock_ms"))
        verdict = "yes" if both["median_ms"] <= LIMIT_MS else "**no**"
        lines.append(
            f"| {result['model']} | {result['branches']} | {note['median_ms']:.2f} | {answer['median_ms']:.2f} | "
            f"{both['median_ms']:.2f} / {both['p90_ms']:.2f} | {clock['median_ms']:.2f} | {verdict} |"
        )
    return "\n".join(lines)


@torch.no_grad()
def result_of(name: str, num_jobs: int) -> dict[str, Any]:
    """The times of all steps of ``num_jobs`` jobs, after one that warms up. ValueError for unknown names."""
    checkpoint = Checkpoint.of_configuration(name, "cpu", torch.float32)
    with torch.device("meta"):
        model = Checkpoint.of_configuration(name, "meta", torch.float32).outline()
    opened = OpenedPipeline(checkpoint.path, torch.device("cpu"), torch.float32)
    request = checkpoint.defaults.request(small_size(checkpoint.defaults))
    sampler, predictions = BlocksSampler(opened), Predictions(model)
    conditioning = blank_conditioning(opened, request, opened.max_tokens(checkpoint.defaults.max_tokens))
    steps: list[Step] = []
    for job in range(num_jobs + 1):
        state = sampler.begin(request, conditioning)
        of_job = list(steps_of(sampler, state, predictions))
        steps += of_job if job else []
    values = {
        "note_ms": [step.note_ms for step in steps],
        "answer_ms": [step.answer_ms for step in steps],
        "step_ms": [step.both_ms for step in steps],
        "clock_ms": [step.clock_ms for step in steps],
    }
    times = {key: rounded(Times.of(these)) for key, these in values.items()}
    return {"model": name, "branches": max(step.num_branches for step in steps), **times}


def steps_of(sampler: BlocksSampler, state: Any, predictions: Predictions) -> Iterator[Step]:
    """Walks a job to its end. What tells branches apart, and draws for them, is not counted."""
    for _ in range(sampler.num_steps(state)):
        began_s, (branches, note_ms) = time.perf_counter(), timed(lambda state=state: sampler.branches(state))
        noted_s = time.perf_counter()
        drawn = tuple(predictions.of(branch) for branch in branches)
        drawn_s = time.perf_counter()
        state, answer_ms = timed(lambda state=state, drawn=drawn: sampler.advance(state, drawn))
        clock_s = noted_s - began_s + time.perf_counter() - drawn_s
        yield Step(num_branches=len(branches), note_ms=note_ms, answer_ms=answer_ms, clock_ms=clock_s * MS_PER_S)


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    began_s = time.thread_time()
    answer = call()
    return answer, (time.thread_time() - began_s) * MS_PER_S


def rounded(times: Times) -> dict[str, float]:
    return {name: round(value, 3) for name, value in asdict(times).items() if value is not None}


def _on_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--jobs", type=int, default=5, help="each of as many steps as the model takes")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
