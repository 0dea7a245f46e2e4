"""Pictures without Ray, Serve, HTTP and gangs: the pipeline in one process and one thread, as each stage is served.

    python -m benchmarks.bare [MODEL] [--num 20]

It is the ceiling of ``benchmarks.application``: seconds from the request to the PNG, with the plain module and with the
engine that ranks use. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import replace
from importlib.metadata import version

import torch

from benchmarks.application.client import PROMPT
from benchmarks.results import Spread
from engines.torch_engine.engine import TorchEngine
from pipelines.checkpoint import Checkpoint
from pipelines.media.encode import encode_frames
from pipelines.request import MediaRequest
from pipelines.run import Pipeline, load_pipeline

NUM_WARM_UP = 2
PARTS = ("denoise", "decode", "total")


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="flux-shapes")
    parser.add_argument("--num", type=int, default=20, help="pictures by each pipeline, in turns")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    request, both = default_request(arguments.model), pipelines(arguments.model)
    runs = [
        {name: draw(pipeline, replace(request, seed=seed)) for name, pipeline in both.items()}
        for seed in range(NUM_WARM_UP + arguments.num)
    ][NUM_WARM_UP:]
    found = {name: {part: Spread.of([run[name][part] for run in runs]).rounded() for part in PARTS} for name in both}
    versions = {name: version(name) for name in ("torch", "diffusers")}
    print(json.dumps({"model": arguments.model, "cores": os.cpu_count(), "versions": versions, "bare_s": found}))


if __name__ == "__main__":
    main()
