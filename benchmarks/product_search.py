"""Which of cuBLASLt's algorithms is fastest for each of FLUX.1-dev's products, on this GPU.

    python -m benchmarks.product_search --out engines/torch_engine/cublaslt/recorded/nvidia_h200.json

All algorithms of one family of kernels are tried, in a random order, and the best timed in turns with PyTorch's own
call on a hot GPU. What gains a hundredth is recorded, each problem as soon as it is decided.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import islice, product
from operator import itemgetter
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from engines.torch_engine.cublaslt import Algorithm, CublasLt, CublasLtError, Epilogue, Matmul, Problem, Recorded, Table
from engines.torch_engine.cublaslt.algorithm import tiles_of
from engines.torch_engine.product import NativeProduct

WIDTH, MLP, TEXT = 3072, 12288, 512
FAMILY, STAGES = 66, 35
"""Hopper's and Blackwell's kernels ("nvjet"), which choose their number of stages themselves."""
CLUSTERS, OPTIONS = range(2, 10), range(8)
FINALISTS, SEMIFINALISTS = 8, 24
LEAST_GAIN = 0.01
Call = Callable[[int], object]


def problems(sides: list[int], widths: list[int]) -> list[Problem]:
    """A rank's, each once: of single-stream blocks, of a dual-stream block's picture and of its text."""
    found: dict[Problem, None] = {}
    for side, width in product(sides, widths):
        picture, text = (side // 16) ** 2 // width, TEXT // width
        every: tuple[tuple[int, int, int, Epilogue], ...] = (
            (picture + text, 3 * WIDTH, WIDTH, "bias" if width == 1 else "none"),
            (picture + text, MLP, WIDTH, "gelu"),
            (picture + text, WIDTH, MLP, "bias"),
            (picture + text, WIDTH, WIDTH, "add"),
            *((rows, 3 * WIDTH, WIDTH, "bias") for rows in (picture, text)),
            *((rows, MLP, WIDTH, "gelu") for rows in (picture, text)),
            *((rows, WIDTH, MLP, "bias") for rows in (picture, text)),
            *((rows, WIDTH, WIDTH, "bias") for rows in (picture, text)),
        )
        for rows, features, inner, epilogue in every:
            found[Problem(rows=rows, features=features, inner=inner, epilogue=epilogue)] = None
    return list(found)


class Trial:
    """A problem's matrices, more of them than the cache holds, and its calls: repeat n takes the next."""

    def __init__(self, problem: Problem, library: CublasLt) -> None:
        self.problem, self._library = problem, library
        options = {"device": "cuda", "dtype": torch.bfloat16}
        self._x = [torch.randn(problem.rows, problem.inner, **options) for _ in range(2)]
        self._weights = [0.02 * torch.randn(problem.features, problem.inner, **options) for _ in range(3)]
        has_bias = problem.epilogue in ("bias", "gelu")
        self._bias_N = torch.randn(problem.features, **options) if has_bias else None
        self._out = torch.zeros(problem.rows, problem.features, **options)

    def own_choice(self) -> Call:
        products = [NativeProduct(weight_NK, self._bias_N) for weight_NK in self._weights]

        def call(n: int) -> Tensor:
            x, mine = self._x[n % 2], products[n % 3]
            if self.problem.epilogue == "gelu":
                return mine.activated(x)
            return mine.add(self._out, x)[0] if self.problem.epilogue == "add" else mine(x, self._out)

        return call

    def by(self, algorithm: Algorithm) -> Call:
        """Raises CublasLtError."""
        matmul = Matmul(self.problem, algorithm, self._library)
        return lambda n: matmul(self._x[n % 2], self._weights[n % 3], self._bias_N, self._out)

    def agrees(self, call: Call) -> bool:
        answers = []
        for one in (self.own_choice(), call):
            self._out.zero_()
            answer = one(0)
            assert isinstance(answer, Tensor)
            answers.append(answer.float().clone())
        return bool((answers[0] - answers[1]).norm() <= 0.01 * answers[0].norm())


def algorithms(library: CublasLt) -> list[Algorithm]:
    """Of the family, in a random order that is always the same."""
    every = [
        Algorithm(family=FAMILY, tile=tile, stages=STAGES, cluster=cluster, option=option)
        for tile, cluster, option in product(tiles_of(FAMILY, library), CLUSTERS, OPTIONS)
    ]
    random.Random(0).shuffle(every)
    return every


def timed(trial: Trial, order: Iterable[Algorithm], limit_s: float) -> list[tuple[float, Algorithm]]:
    """What the library accepts, briefly, fastest first."""
    end_s, found = time.monotonic() + limit_s, []
    for algorithm in order:
        with suppress(CublasLtError):
            call = trial.by(algorithm)
            took_us(call, 1)  # loads the kernel
            found.append((took_us(call, 2), algorithm))
        if time.monotonic() > end_s:
            break
    return sorted(found, key=itemgetter(0))


def took_us(call: Call, repeats: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for n in range(repeats):
        call(n)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats * 1000


def fastest(trial: Trial, order: Iterable[Algorithm], limit_s: float) -> tuple[Recorded | None, str]:
    """And how many algorithms were timed. Some that the library accepts compute something else: none of them counts."""
    found = timed(trial, order, limit_s)
    right = (algorithm for _, algorithm in found if trial.agrees(trial.by(algorithm)))
    best = list(islice(right, SEMIFINALISTS))
    if not best:
        return None, f"{len(found)}, all wrong"
    finalists = sorted(best, key=lambda algorithm: took_us(trial.by(algorithm), 8))[:FINALISTS]
    own_us, *times = in_turns([trial.own_choice(), *map(trial.by, finalists)])
    us, algorithm = min(zip(times, finalists, strict=True), key=itemgetter(0))
    recorded = Recorded(problem=trial.problem, algorithm=algorithm, us=round(us, 1), default_us=round(own_us, 1))
    num_wrong = [algorithm for _, algorithm in found].index(best[-1]) + 1 - len(best)
    return recorded, f"{len(found)}, {num_wrong} wrong ones before the last of {len(best)}"


def in_turns(calls: list[Call], rounds: int = 7, block_us: float = 15e3) -> list[float]:
    """Median of each."""
    repeats = [max(4, int(block_us / took_us(call, 4))) for call in calls]
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for n, call in enumerate(calls):
            times[n].append(took_us(call, repeats[n]))
    return [statistics.median(some) for some in times]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sides", type=int, nargs="+", default=[1024, 2048, 512])
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--limit-s", type=float, default=4, help="for the first look at a problem's algorithms")
    arguments = parser.parse_args()
    warm = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    took_us(lambda _: warm @ warm, 2000)
    with patch("engines.torch_engine.product.recorded_matmul", lambda *_: None):  # what PyTorch does by itself
        search(problems(arguments.sides, arguments.widths), arguments.out, arguments.limit_s)


def search(every: Iterable[Problem], out: Path, limit_s: float) -> None:
    library = CublasLt()
    order, recorded = algorithms(library), []
    for problem in every:
        found, tried = fastest(Trial(problem, library), order, limit_s)
        print(f"{found or problem} of {tried}", flush=True)
        if found is None or found.us > (1 - LEAST_GAIN) * found.default_us:
            continue
        recorded.append(found)
        order = [found.algorithm, *(algorithm for algorithm in order if algorithm != found.algorithm)]
        table = Table(gpu=torch.cuda.get_device_name(), version=library.version, recorded=tuple(recorded))
        out.write_text(table.to_json())


if __name__ == "__main__":
    main()
