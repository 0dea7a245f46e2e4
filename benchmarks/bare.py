"""A picture without Ray, Serve, HTTP and gangs: the pipeline in one process and one thread, as each stage is served.

    python -m benchmarks.bare MODEL REPEATS

Prints one JSON document: seconds from the request to the PNG, with the plain module and with the engine that ranks use.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace

import torch

from engines.torch_engine.engine import TorchEngine
from pipelines.loading import resolve_path
from pipelines.media import encode_frames
from pipelines.registry import load_family
from pipelines.request import MediaRequest
from pipelines.run import Pipeline, load_pipeline

CPU = torch.device("cpu")
PROMPT = "a small red circle above a large blue square on a white background"
NUM_WARM_UP = 2


def default_request(model: str) -> MediaRequest:
    """One picture of the size and with the steps that ``model`` has by default."""
    own = load_family(resolve_path(model)).defaults(resolve_path(model))
    return MediaRequest(
        request_id="bare",
        model=model,
        kind=own.kind,
        prompt=PROMPT,
        width=own.width,
        height=own.height,
        num_inference_steps=own.num_inference_steps,
        guidance_scale=own.guidance_scale,
        true_cfg_scale=own.true_cfg_scale,
        seed=0,
    )


def pipelines(model: str) -> dict[str, Pipeline]:
    path = resolve_path(model)
    plain = load_pipeline(path, CPU, torch.float32)
    engine = TorchEngine(load_family(path).load_denoiser(path, CPU, torch.float32))
    return {"plain": plain, "engine": replace(plain, engine=engine)}


def draw(pipeline: Pipeline, request: MediaRequest) -> dict[str, float]:
    """Seconds: to the latents (text included), from there to the PNG, and both."""
    started_s = time.perf_counter()
    latents = pipeline.denoise(request)
    denoised_s = time.perf_counter()
    encode_frames(pipeline.decoder.decode(latents, request), "png")
    ended_s = time.perf_counter()
    return {"denoise": denoised_s - started_s, "decode": ended_s - denoised_s, "total": ended_s - started_s}


def main(model: str, num_repeats: int) -> None:
    torch.set_num_threads(1)
    request, both = default_request(model), pipelines(model)
    times: dict[str, list[dict[str, float]]] = {name: [] for name in both}
    # In turns, so that what else the machine does hits both alike.
    for index in range(NUM_WARM_UP + num_repeats):
        for name, pipeline in both.items():
            taken = draw(pipeline, replace(request, seed=index))
            if index >= NUM_WARM_UP:
                times[name].append(taken)
    print(json.dumps(times))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
