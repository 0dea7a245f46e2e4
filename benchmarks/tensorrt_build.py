"""Time, memory and size of exports and builds: `python -m benchmarks.tensorrt_build --models flux-dev --widths 4`.

No GPU is needed. Full-size models are made under fake tensors, so their weights exist nowhere and become engine inputs;
shipped models are made with random weights in the shapes that ship. Every case runs in a process of its own, whose
peak memory is reported. The last line of output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from engines.model import Branch, DenoiserModel
from engines.parallel.spec import ParallelSpec
from engines.tensorrt_engine.bindings import load_bindings
from engines.tensorrt_engine.builder import BuildOptions, build
from engines.tensorrt_engine.export import export
from engines.tensorrt_engine.plan_text import read_plan_text
from engines.tensorrt_engine.targets import Target
from engines.tensorrt_engine.trace import offline_team

MIB = 1 << 20
Made = tuple[DenoiserModel, dict[str, Tensor]]


def flux(height: int, width: int, num_text: int, **config: Any) -> Made:
    """A FLUX transformer and one step's inputs; ``height`` and ``width`` are those of the latent."""
    from diffusers import FluxTransformer2DModel

    from pipelines.flux.denoiser import as_denoiser

    transformer = FluxTransformer2DModel(guidance_embeds=True, **config).eval()
    size = transformer.config
    num_image = height * width // 4
    return as_denoiser(transformer), {
        "hidden_states": torch.zeros(1, num_image, size.in_channels),
        "encoder_hidden_states": torch.zeros(1, num_text, size.joint_attention_dim),
        "pooled_projections": torch.zeros(1, size.pooled_projection_dim),
        "timestep": torch.zeros(1),
        "guidance": torch.zeros(1),
        "img_ids": torch.zeros(num_image, 3),
        "txt_ids": torch.zeros(num_text, 3),
    }


def wan(frames: int, height: int, width: int, num_text: int, **config: Any) -> Made:
    """A Wan transformer and one step's inputs; the sizes are those of the latent."""
    from diffusers import WanTransformer3DModel

    from pipelines.wan.denoiser import as_denoiser

    transformer = WanTransformer3DModel(**config).eval()
    size = transformer.config
    return as_denoiser({"transformer": transformer}), {
        "hidden_states": torch.zeros(1, size.in_channels, frames, height, width),
        "timestep": torch.zeros(1, dtype=torch.float32),
        "encoder_hidden_states": torch.zeros(1, num_text, size.text_dim),
    }


def flux_shapes() -> Made:
    from pipelines.training.flux_model import build_transformer

    return flux(16, 16, 32, **_config(build_transformer().config, "guidance_embeds"))


def wan_shapes() -> Made:
    from pipelines.training.wan_model import build_transformer

    return wan(5, 12, 12, 32, **_config(build_transformer().config))


def _config(config: Any, *without: str) -> dict[str, Any]:
    return {name: value for name, value in dict(config).items() if not name.startswith("_") and name not in without}


MODELS: dict[str, tuple[Callable[[], Made], bool]] = {
    "flux-shapes": (flux_shapes, False),
    "wan-shapes": (wan_shapes, False),
    "flux-dev": (lambda: flux(128, 128, 512), True),
    "wan-14b": (lambda: wan(21, 60, 104, 512, num_attention_heads=40, num_layers=40, ffn_dim=13824), True),
}
"""Name -> (how it is made, whether under fake tensors). Full size: 1024 x 1024 px, and 81 frames of 832 x 480 px."""


def measure(model: str, strategy: str, width: int, target: str, weights: str) -> dict[str, Any]:
    """Export and build one case in bfloat16."""
    make, is_fake = MODELS[model]
    torch.set_num_threads(1)
    with FakeTensorMode(allow_non_fake_inputs=True) if is_fake else nullcontext():
        torch.set_default_dtype(torch.bfloat16)
        denoiser, inputs = make()
        torch.set_default_dtype(torch.float32)
        num_parameters = sum(p.numel() for module in denoiser.modules.values() for p in module.parameters())
        clock = Clock()
        with offline_team(ParallelSpec.of(strategy, width)) as team:
            graph = export(denoiser, Branch(inputs=inputs), team, weights_as_inputs=weights == "inputs").graph
    exported = clock.lap("export")
    serialized = graph.serialized()
    clock.lap("serialize")
    plan = build(serialized, BuildOptions(target=Target.parse(target))).plan
    built = clock.lap("build")
    text = read_plan_text(plan)
    return {
        "model": model,
        "strategy": strategy,
        "width": width,
        "target": target,
        "weights": weights,
        "num_parameters": num_parameters,
        **exported,
        **built,
        "graph_mib": round(len(serialized) / MIB, 2),
        "plan_mib": round(len(plan) / MIB, 1),
        "collectives": text.collectives if text else graph.collectives(),
        "attentions": graph.num_attentions(),
        "fused_attentions": text.num_fused_attentions if text else None,
    }


class Clock:
    """Wall and processor seconds since the last lap, and the process's peak memory so far."""

    def __init__(self) -> None:
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()

    def lap(self, name: str) -> dict[str, float]:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        took = {f"{name}_wall_s": round(wall_s - self._wall_s, 1), f"{name}_cpu_s": round(cpu_s - self._cpu_s, 1)}
        self._wall_s, self._cpu_s = wall_s, cpu_s
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {**took, f"{name}_peak_gib": round(peak_bytes / 2**30, 2)}


def in_own_process(case: tuple[str, ...]) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.tensorrt_build", "--one", *case]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        return {"case": "-".join(case), "error": reason[:300]}
    measured: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return measured


def shown(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"| {row['case']} | {row['error']} |"
    exchanges = ", ".join(f"{number} {name}" for name, number in sorted(row["collectives"].items()))
    return (
        f"| {row['model']} | {row['strategy']} {row['width']} | {row['target']} | {row['weights']} "
        f"| {row['export_cpu_s']} ({row['export_wall_s']}) | {row['export_peak_gib']} "
        f"| {row['build_cpu_s']} ({row['build_wall_s']}) | {row['build_peak_gib']} | {row['graph_mib']} "
        f"| {row['plan_mib']} | {exchanges} | {row['fused_attentions']} of {row['attentions']} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["flux-shapes", "wan-shapes"], choices=MODELS)
    parser.add_argument("--strategies", nargs="+", default=["ulysses", "allgather_kv", "hybrid", "tensor"])
    parser.add_argument("--widths", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--targets", nargs="+", default=["sm89"])
    parser.add_argument("--weights", nargs="+", default=["inputs"], choices=["inputs", "constants"])
    parser.add_argument("--one", nargs=5, metavar=("MODEL", "STRATEGY", "WIDTH", "TARGET", "WEIGHTS"))
    given = parser.parse_args()
    if given.one:
        model, strategy, width, target, weights = given.one
        print(json.dumps(measure(model, strategy, int(width), target, weights)))
        return
    print("| model | strategy | target | weights | export CPU (wall) s | peak GiB | build CPU (wall) s | peak GiB "
          "| graph MiB | plan MiB | collectives | fused |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    rows = []
    for case in ((m, s, str(n), t, w) for m in given.models for s in given.strategies for n in given.widths
                 for t in given.targets for w in given.weights):  # fmt: skip
        if case[1:3] == ("hybrid", "2"):
            continue  # two ranks have one axis
        rows.append(in_own_process(case))
        print(shown(rows[-1]), flush=True)
    print(json.dumps({"hardware": hardware(), "versions": versions(), "rows": rows}))


def hardware() -> dict[str, Any]:
    return {"machine": platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()[0]}


def versions() -> dict[str, str]:
    bindings = load_bindings()
    packages = {name: version(name) for name in ("torch", "diffusers", "onnx", "onnxscript", "onnxruntime")}
    return {**packages, bindings.product: bindings.version, "python": platform.python_version()}


if __name__ == "__main__":
    main()
