"""What a precision costs: whole pictures through quantized engine graphs: `python -m benchmarks.tensorrt_accuracy`.

flux-shapes at width 1 (splitting changes nothing that rounding would show) in onnxruntime, held against the same
prompts and seeds in torch float32. int8 and fp8 are calibrated on other prompts than they are judged on.
bfloat16 has no CPU kernels in onnxruntime, so its row is torch's. The last line of output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from engines.model import Branch, DenoiserModel
from engines.parallel.spec import ParallelSpec
from engines.tensorrt_engine.export import Exported, export, rank_weights
from engines.tensorrt_engine.quantize import Kind, observed, quantize
from engines.tensorrt_engine.simulate import Simulator
from engines.tensorrt_engine.trace import offline_team, unchanged
from pipelines.loading import resolve_path
from pipelines.registry import load_family
from pipelines.request import MediaRequest
from pipelines.run import Pipeline, load_pipeline
from pipelines.training.evaluate import check_still, held_out_prompts
from pipelines.training.judge import look_at
from pipelines.training.scenes import Scene

MODEL, CPU = "flux-shapes", torch.device("cpu")
CALIBRATION_SEED, JUDGED_SEED = 5, 77
Prompts = list[tuple[Scene, str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphEngine:
    """An ``Engine`` of one rank: an exported graph in onnxruntime."""

    exported: Exported
    simulator: Simulator
    weights: dict[str, Any]
    dtype: torch.dtype

    def predict(self, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> tuple[Tensor, ...]:
        return tuple(self._predict(branch) for branch in branches)

    def close(self) -> None:
        """Nothing to release."""

    def _predict(self, branch: Branch) -> Tensor:
        handed = self.exported.feed(branch.inputs, 0)
        inputs = {name: tensor.numpy() for name, tensor in self.exported.engine_inputs(handed).items()}
        (results,) = self.simulator.run([inputs | self.weights])
        outputs = dict(zip(self.exported.graph.outputs, map(torch.from_numpy, results), strict=True))
        return self.exported.finish(handed, outputs)


def graph_engine(branch: Branch, dtype: torch.dtype, change: Callable[[DenoiserModel], Any]) -> GraphEngine:
    model = load_model(dtype)
    spec = ParallelSpec()
    with offline_team(spec) as team:
        exported = export(model, branch, team, change=change(model))
        weights = rank_weights(model, branch.module, team)
    named = {name: weights[name].numpy() for name in exported.graph.weights}
    return GraphEngine(exported=exported, simulator=Simulator(exported.graph.serialized()), weights=named, dtype=dtype)


def load_model(dtype: torch.dtype) -> DenoiserModel:
    path = resolve_path(MODEL)
    return load_family(path).load_denoiser(path, CPU, dtype)


def request_of(prompt: str, seed: int) -> MediaRequest:
    path = resolve_path(MODEL)
    defaults = load_family(path).defaults(path)
    return MediaRequest(
        request_id="accuracy",
        model=MODEL,
        kind="image",
        prompt=prompt,
        width=defaults.width,
        height=defaults.height,
        num_inference_steps=defaults.num_inference_steps,
        guidance_scale=defaults.guidance_scale,
        true_cfg_scale=1.0,
        seed=seed,
    )


def calibrated(pipeline: Pipeline, model: DenoiserModel, prompts: Prompts) -> dict[str, float]:
    """Largest activations over all steps of the prompts. The pipeline runs ``model``."""
    (module,) = model.modules.values()
    with observed(module, model.plan) as amax:
        for seed, (_, prompt) in enumerate(prompts):
            pipeline.denoise(request_of(prompt, 1000 + seed))
    return amax


def first_branch(prompt: str, dtype: torch.dtype) -> Branch:
    path = resolve_path(MODEL)
    family, request = load_family(path), request_of(prompt, 0)
    sampler = family.load_sampler(path, CPU, dtype)
    conditioning = family.load_text_encoder(path, CPU, dtype).encode(request)
    branch: Branch = sampler.branches(sampler.begin(request, conditioning))[0]
    return branch


def quantizing(kind: Kind, amax: dict[str, float]) -> Callable[[DenoiserModel], Callable[[nn.Module], nn.Module]]:
    return lambda model: lambda module: quantize(module, model.plan, amax, kind)


def pictures(pipeline: Pipeline, prompts: Prompts) -> list[NDArray[Any]]:
    return [pipeline.run(request_of(prompt, seed))[0] for seed, (_, prompt) in enumerate(prompts)]


def psnr_db(given: NDArray[Any], expected: NDArray[Any]) -> float:
    error = float(np.mean((given.astype(np.float64) - expected.astype(np.float64)) ** 2))
    return math.inf if error == 0 else 10 * math.log10(255**2 / error)


def right_share(frames: list[NDArray[Any]], prompts: Prompts) -> float:
    """Pictures that show the asked shapes in the asked colours."""
    checks = [check_still(scene, look_at(frame)) for frame, (scene, _) in zip(frames, prompts, strict=True)]
    return mean(float(check["shape and colour"]) for check in checks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--calibration-prompts", type=int, default=4)
    given = parser.parse_args()
    torch.set_num_threads(1)
    random.seed(0)
    judged = held_out_prompts(given.prompts, JUDGED_SEED)
    path = resolve_path(MODEL)
    torch_model = load_model(torch.float32)
    reference = load_pipeline(path, CPU, torch.float32, _plain(torch_model))
    amax = calibrated(reference, torch_model, held_out_prompts(given.calibration_prompts, CALIBRATION_SEED))
    wanted = pictures(reference, judged)
    rows: list[dict[str, Any]] = [{"precision": "fp32, torch", "psnr_db": None, "right": right_share(wanted, judged)}]
    branch, half = first_branch(judged[0][1], torch.float32), first_branch(judged[0][1], torch.float16)
    engines: dict[str, Callable[[], Pipeline]] = {
        "bf16, torch": lambda: load_pipeline(path, CPU, torch.bfloat16),
        "fp32": lambda: _with(graph_engine(branch, torch.float32, lambda model: unchanged)),
        "fp16": lambda: _with(graph_engine(half, torch.float16, lambda model: unchanged)),
        "int8": lambda: _with(graph_engine(branch, torch.float32, quantizing("int8", amax))),
        "fp8": lambda: _with(graph_engine(branch, torch.float32, quantizing("fp8", amax))),
    }
    for precision, make in engines.items():
        started_s = time.perf_counter()
        frames = pictures(make(), judged)
        psnrs = [psnr_db(*pair) for pair in zip(frames, wanted, strict=True)]
        row = {"precision": precision, "psnr_db": round(median(psnrs), 1), "worst_psnr_db": round(min(psnrs), 1)}
        rows.append({**row, "right": right_share(frames, judged), "took_s": round(time.perf_counter() - started_s, 1)})
        print(rows[-1], flush=True)
    print(json.dumps({"model": MODEL, "prompts": given.prompts, "rows": rows}))


def _plain(model: DenoiserModel) -> Any:
    from pipelines.run import PlainEngine

    return PlainEngine(model=model)


def _with(engine: GraphEngine) -> Pipeline:
    return load_pipeline(resolve_path(MODEL), CPU, engine.dtype, engine)


if __name__ == "__main__":
    main()
