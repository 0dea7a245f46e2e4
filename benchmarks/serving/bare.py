"""Pictures without Ray, Serve, HTTP and gangs: the pipeline in one process and one thread, as each stage is served.

    python -m benchmarks.serving.bare MODEL

Draws a picture for each line on stdin and answers with a line of JSON: seconds from the request to the PNG, with the
plain module and with the engine that ranks use. So pictures can take turns with other measurements.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from benchmarks.application.client import PROMPT
from engines.torch_engine.engine import TorchEngine
from pipelines.checkpoint import Checkpoint
from pipelines.media.encode import encode_frames
from pipelines.request import MediaRequest
from pipelines.run import Pipeline, load_pipeline

NUM_WARM_UP = 2

Times = dict[str, dict[str, float]]
"""Seconds by pipeline ("plain", "engine") and part ("denoise", "decode", "total")."""


def default_request(model: str) -> MediaRequest:
    """Return a request with the defaults of ``model``."""
    return Checkpoint.open(model).defaults.request(model=model, prompt=PROMPT, request_id="bare")


def pipelines(model: str) -> dict[str, Pipeline]:
    checkpoint = Checkpoint.open(model)
    plain = load_pipeline(checkpoint)
    engine = TorchEngine(checkpoint.denoiser())
    return {"plain": plain, "engine": replace(plain, engine=engine)}


def draw(pipeline: Pipeline, request: MediaRequest) -> dict[str, float]:
    """Return the seconds from the request to the latents, from there to the PNG, and of both."""
    started_s = time.perf_counter()
    latents = pipeline.denoise(request)
    denoised_s = time.perf_counter()
    encode_frames(pipeline.decoder.decode(latents, request), "png")
    ended_s = time.perf_counter()
    return {"denoise": denoised_s - started_s, "decode": ended_s - denoised_s, "total": ended_s - started_s}


def main(model: str) -> None:
    torch.set_num_threads(1)
    request, both = default_request(model), pipelines(model)
    for seed, _ in enumerate(sys.stdin):
        times = {name: draw(pipeline, replace(request, seed=seed)) for name, pipeline in both.items()}
        print(json.dumps(times), flush=True)


@contextmanager
def bare(model: str) -> Iterator[Callable[[], Times]]:
    """Yield a function that draws in its own warm process, which sleeps between calls."""
    command = [sys.executable, "-m", "benchmarks.serving.bare", model]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def ask() -> Times:
            print(file=stdin, flush=True)
            times: Times = json.loads(stdout.readline())
            return times

        for _ in range(NUM_WARM_UP):
            ask()
        yield ask
        stdin.close()


if __name__ == "__main__":
    main(sys.argv[1])
