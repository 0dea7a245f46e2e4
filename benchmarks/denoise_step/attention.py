"""Kernels of attention for the step: cuDNN's, FlashAttention-2 as PyTorch ships it, and FlashAttention-3 of fa3-fwd.

    python -m benchmarks.denoise_step.attention [--out FILE]                one GPU (or a small model on the CPU)

Each alone at FLUX.1's shapes on 1, 2 and 4 ranks, and in a whole captured step of FLUX.1-dev (random weights) on one.
They take turns, so that a GPU that warms up favours none, and each answer is compared: alone with the first kernel's,
in a step with the module's. fa3-fwd is left out where it cannot be imported. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.denoise_step.cases import Case
from benchmarks.denoise_step.runners import Bench
from benchmarks.results import tell
from benchmarks.timing import measure
from engines.core.layout import Rows
from engines.core.tensors import relative_difference
from engines.parallel.local_attention import cuda_flash, plain_attention, take_rows
from engines.torch_engine.exchange.heads import Attend, attend_tokens_first, cudnn_out, local_attention, without_lse

SHAPES = ((4608, 24), (4608, 12), (4608, 6), (16896, 24), (16896, 12), (16896, 6))
"""Tokens and heads of one rank: 1024² and 2048², on 1, 2 and 4 ranks."""
SMALL_SHAPES = ((72, 4), (40, 2))
DIM = 128
SIDES = (1024, 2048)
ROUNDS, CALLS, REPEATS = 5, 8, 3
"""``CALLS`` of a kernel are one repeat."""
LARGEST_ERROR = 0.02
"""Between two kernels in bf16, relative."""


def kernels(device: torch.device, dtype: torch.dtype) -> dict[str, Attend]:
    """The choices on a device by name."""
    if device.type != "cuda":
        return {"flash": local_attention(device, dtype), "plain": without_lse(plain_attention)}
    found = {"cuDNN": cudnn_out, "FlashAttention-2": without_lse(cuda_flash)}
    try:
        return {**found, "FlashAttention-3": flash_attention_3()}
    except ImportError as error:
        print(f"FlashAttention-3 is left out: {error}", flush=True)
        return found


def flash_attention_3() -> Attend:
    """Of fa3-fwd; ImportError without it."""
    forward: Any = importlib.import_module("fa3_fwd_interface").flash_attn_func

    def attend(q_BLHD: Tensor, k_BMHD: Tensor, v_BMHD: Tensor) -> Tensor:
        found = forward(q_BLHD, k_BMHD, v_BMHD)
        out_BLHD: Tensor = found[0] if isinstance(found, tuple) else found
        return out_BLHD

    return attend


def alone(device: torch.device, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Yields times of each kernel on queries, keys and values as a step's products leave them, side by side."""
    for length, heads in SHAPES if device.type == "cuda" else SMALL_SHAPES:
        qkv_LB3HD = torch.randn(length, 1, 3, heads, DIM, device=device, dtype=dtype)
        calls = {
            name: partial(attend_tokens_first, attend, qkv_LB3HD) for name, attend in kernels(device, dtype).items()
        }
        expected = next(iter(calls.values()))()
        for name, call in calls.items():
            error = relative_difference(call(), expected)
            assert error < LARGEST_ERROR, f"{name} is wrong: relative error {error:.3f}"
        tera_flop = 4 * length**2 * heads * DIM / 1e12
        for name, time_ms in in_turns({name: repeated(call) for name, call in calls.items()}).items():
            each_ms = time_ms / CALLS
            yield {
                "kernel": name, "tokens": length, "heads": heads, "each_us": round(1000 * each_ms, 1),
                "tflop_per_s": round(1000 * tera_flop / each_ms, 1),
            }  # fmt: skip


def repeated(call: Callable[[], object]) -> Callable[[], object]:
    return lambda: [call() for _ in range(CALLS)]


def in_steps(bench: Bench) -> Iterator[dict[str, Any]]:
    """Yields times of a whole step of each side with each kernel, each seen to be right."""
    choices = kernels(bench.device, bench.dtype)
    for side in SIDES:
        case = bench.fitting(Case(maker="fast", side=side, num_ranks=1, peer_memory=True))
        ready, errors, closing = {}, {}, []
        for name, attend in choices.items():
            with patch("engines.torch_engine.fast_step.local_attention", partial(_chosen, attend)):
                ready[name], close = bench.prepare(case)
            errors[name] = bench.error(case, ready[name]())
            closing.append(close)
        for name, time_ms in in_turns(ready).items():
            yield {"kernel": name, "side": case.side, "step_ms": round(time_ms, 2), "relative_error": errors[name]}
        for close in closing:
            close()


def _chosen(attend: Attend, _device: torch.device, _dtype: torch.dtype, key_rows: Rows | None = None) -> Attend:
    """In place of ``local_attention``."""
    if key_rows is None:
        return attend
    return lambda q_BLHD, k_BMHD, v_BMHD: attend(q_BLHD, take_rows(k_BMHD, key_rows), take_rows(v_BMHD, key_rows))


def in_turns(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Milliseconds of each call: the median of the rounds' medians."""
    medians: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            medians[name].append(measure(call, repeats=REPEATS, warm_up=1).median_ms)
    return {name: statistics.median(times) for name, times in medians.items()}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    out: Path | None = parser.parse_args().out
    bench = Bench(rank=0, world=1, small=not torch.cuda.is_available())

    def results() -> Iterator[dict[str, Any]]:
        yield from alone(bench.device, bench.dtype)
        yield from in_steps(bench)

    tell({"hardware": bench.device_name, "torch": torch.__version__}, results(), out)


if __name__ == "__main__":
    main()
