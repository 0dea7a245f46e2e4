"""What a precision costs: whole pictures and clips through engine graphs: `python -m benchmarks.tensorrt.accuracy`.

A shipped model on one rank (splitting changes nothing that rounding would show) in onnxruntime, held against the same
prompts and seeds in torch float32 and bfloat16, and judged by what it shows. int8 and fp8 are calibrated on other
prompts than they are judged on. bfloat16 has no CPU kernels in onnxruntime, so its rows are torch's, with the same
quantized layers. The last line of output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engines.core.model import Branch, DenoiserModel
from engines.core.spec import ParallelSpec, Scheme
from engines.quantization.calibration import recording
from engines.quantization.onnx import Quantization
from engines.tensorrt_engine.export.exported import EngineExport, export, rank_weights
from engines.tensorrt_engine.export.trace import ChangeModule, offline_team, unchanged
from pipelines.checkpoint import Checkpoint
from pipelines.defaults import Defaults
from pipelines.loading import resolve_path
from pipelines.request import MediaRequest
from pipelines.run import Pipeline, PlainEngine, load_pipeline
from tests.engines.tensorrt_engine.support.simulate import Simulator
from training.evaluate import check_motion, check_still, held_out_motion_prompts, held_out_prompts
from training.judge import look_at

CPU = torch.device("cpu")
EQUAL_DB = 999.0
"""What stands for pictures that are equal byte for byte."""

CALIBRATION_SEED, JUDGED_SEED, CALIBRATION_NOISE = 5, 77, 1000
Prompts = list[tuple[Any, str]]
"""What the picture should show, and the words for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A shipped model and its prompts."""

    name: str
    path: Path
    defaults: Defaults

    @classmethod
    def of(cls, name: str) -> Subject:
        path = resolve_path(name)
        return cls(name=name, path=path, defaults=Checkpoint(path).defaults)

    def model(self, dtype: torch.dtype) -> DenoiserModel:
        return Checkpoint(self.path, CPU, dtype).denoiser()

    def pipeline(self, dtype: torch.dtype, engine: Any = None) -> Pipeline:
        return load_pipeline(Checkpoint(self.path, dtype=dtype), engine)

    def request(self, prompt: str, seed: int) -> MediaRequest:
        return self.defaults.request(model=self.name, prompt=prompt, seed=seed)

    def prompts(self, count: int, seed: int) -> Prompts:
        make = held_out_prompts if self.defaults.kind == "image" else held_out_motion_prompts
        return list(make(count, seed))

    def is_right(self, scene: Any, frames: NDArray[Any]) -> bool:
        """Whether the frames show the asked shapes in the asked colours, and in clips the asked motion."""
        if self.defaults.kind == "image":
            return check_still(scene, look_at(frames[0]))["shape and colour"]
        checks = check_motion(scene, [look_at(frame) for frame in frames])
        return checks["shape and colour"] and checks["motion"]

    def draw(self, pipeline: Pipeline, prompts: Prompts) -> list[NDArray[Any]]:
        return [pipeline.run(self.request(prompt, seed)) for seed, (_, prompt) in enumerate(prompts)]

    def first_branch(self, prompt: str, dtype: torch.dtype) -> Branch:
        request = self.request(prompt, 0)
        checkpoint = Checkpoint(self.path, CPU, dtype)
        sampler, conditioning = checkpoint.sampler(), checkpoint.text_encoder().encode(request)
        branch: Branch = sampler.branches(sampler.begin(request, conditioning))[0]
        return branch


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphEngine:
    """An ``Engine`` of one rank: an exported graph in onnxruntime."""

    exported: EngineExport
    simulator: Simulator
    weights: dict[str, Any]

    def predict(self, branches: tuple[Branch, ...], ranks: tuple[int, ...]) -> tuple[Tensor, ...]:
        return tuple(self._predict(branch) for branch in branches)

    def close(self) -> None:
        """Nothing to release."""

    def _predict(self, branch: Branch) -> Tensor:
        prologue_outputs = self.exported.run_prologue(branch.inputs, 0)
        inputs = {name: tensor.numpy() for name, tensor in self.exported.engine_inputs(prologue_outputs).items()}
        (results,) = self.simulator.run([inputs | self.weights])
        outputs = dict(zip(self.exported.graph.outputs, map(torch.from_numpy, results), strict=True))
        return self.exported.run_epilogue(prologue_outputs, outputs)


Change = Callable[[DenoiserModel], ChangeModule]


def graph_engine(subject: Subject, branch: Branch, dtype: torch.dtype, change: Change) -> GraphEngine:
    model = subject.model(dtype)
    with offline_team(ParallelSpec()) as team:
        exported = export(model, branch, team, change=change(model))
        weights = rank_weights(model, branch.module, team)
    named = {name: weights[name].numpy() for name in exported.graph.weights}
    return GraphEngine(exported=exported, simulator=Simulator(exported.graph.serialized()), weights=named)


def torch_engine(subject: Subject, dtype: torch.dtype, change: Change) -> PlainEngine:
    model = subject.model(dtype)
    for module in model.modules.values():
        change(model)(module)
    return PlainEngine(model=model)


def calibrated(subject: Subject, prompts: Prompts) -> dict[str, float]:
    """Returns the largest activations over all steps of the prompts."""
    model = subject.model(torch.float32)
    pipeline = subject.pipeline(torch.float32, PlainEngine(model=model))
    (module,) = model.modules.values()
    with recording(module, model.plan) as amax:
        for seed, (_, prompt) in enumerate(prompts):
            pipeline.denoise(subject.request(prompt, CALIBRATION_NOISE + seed))
    return amax


def quantizing(kind: Scheme, amax: dict[str, float]) -> Change:
    return lambda model: Quantization(plan=model.plan, amax=amax, scheme=kind)


def psnr_db(drawn: NDArray[Any], expected: NDArray[Any]) -> float:
    error = float(np.mean((drawn.astype(np.float64) - expected.astype(np.float64)) ** 2))
    return EQUAL_DB if error == 0 else 10 * math.log10(255**2 / error)


Engines = dict[str, Callable[[], Pipeline]]


def engines_of(subject: Subject, prompt: str, amax: dict[str, float]) -> Engines:
    """Returns pipelines by precision. The rest of a quantized model is in float32 in graphs, in bfloat16 in torch."""

    def graph(dtype: torch.dtype, change: Change) -> Pipeline:
        return subject.pipeline(dtype, graph_engine(subject, subject.first_branch(prompt, dtype), dtype, change))

    def eager(change: Change) -> Pipeline:
        return subject.pipeline(torch.bfloat16, torch_engine(subject, torch.bfloat16, change))

    plain: Change = lambda model: unchanged  # noqa: E731
    int8, fp8 = quantizing("int8", amax), quantizing("fp8", amax)
    return {
        "fp32": lambda: graph(torch.float32, plain),
        "fp16": lambda: graph(torch.float16, plain),
        "bf16, torch": lambda: eager(plain),
        "int8, the rest fp32": lambda: graph(torch.float32, int8),
        "fp8, the rest fp32": lambda: graph(torch.float32, fp8),
        "int8, the rest bf16, torch": lambda: eager(int8),
        "fp8, the rest bf16, torch": lambda: eager(fp8),
    }


def measure(subject: Subject, judged: Prompts, engines: Engines) -> list[dict[str, Any]]:
    """Returns one row a precision: how near its pictures are to torch's in float32 and bfloat16, and what they show."""
    references = {
        "psnr_db": subject.draw(subject.pipeline(torch.float32), judged),
        "psnr_bf16_db": subject.draw(subject.pipeline(torch.bfloat16), judged),
    }
    rows = []
    for precision, make in {"fp32, torch": lambda: subject.pipeline(torch.float32), **engines}.items():
        started_s = time.perf_counter()
        drawn = subject.draw(make(), judged)
        psnrs = {name: [psnr_db(*pair) for pair in zip(drawn, to, strict=True)] for name, to in references.items()}
        nearness = {name: round(median(values), 1) for name, values in psnrs.items()}
        worst = {f"worst_{name}": round(min(values), 1) for name, values in psnrs.items()}
        rows.append({"precision": precision, **nearness, **worst, "right": _share(subject, drawn, judged)})
        rows[-1]["took_s"] = round(time.perf_counter() - started_s)
        print(rows[-1], flush=True)
    return rows


def _share(subject: Subject, drawn: Sequence[NDArray[Any]], judged: Prompts) -> float:
    return round(mean(subject.is_right(scene, frames) for frames, (scene, _) in zip(drawn, judged, strict=True)), 3)


MakeEngines = Callable[[Subject, Prompts, Prompts], Engines]
"""Pipelines to compare, for a subject, the prompts they are judged by and those to calibrate with."""


def compare(description: str | None, make_engines: MakeEngines) -> None:
    """Reads the command line, prints a row for each pipeline, and at last the JSON document."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="flux-shapes", choices=["flux-shapes", "wan-shapes"])
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--calibration-prompts", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    subject = Subject.of(options.model)
    judged = subject.prompts(options.prompts, JUDGED_SEED)
    engines = make_engines(subject, judged, subject.prompts(options.calibration_prompts, CALIBRATION_SEED))
    print(json.dumps({"model": options.model, "prompts": options.prompts, "rows": measure(subject, judged, engines)}))


def main() -> None:
    compare(__doc__, lambda subject, judged, others: engines_of(subject, judged[0][1], calibrated(subject, others)))


if __name__ == "__main__":
    main()
