"""Relative error of attention in float8 against float32, by layer and by step, on the activations of a job.

    python -m benchmarks.attention_error [MODEL ...] [--steps 8]

The error is the 2-norm of the difference, divided by that of the exact result. Every layer and every step gets the
exact inputs, so errors of earlier ones do not count; only ``latents`` is what they add up to in a whole job. It runs on
the CPU, where attention is the reference in float8. Models without a prompt are left out. The last line is one JSON
document.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import cast

import torch
from torch import Tensor

from engines.core.attention import Kernel, Prefix
from engines.core.tensors import relative_difference
from engines.parallel.local_attention import local_kernel
from pipelines.checkpoint import Checkpoint
from pipelines.loading import shipped_checkpoints
from pipelines.request import MediaRequest
from pipelines.run import Pipeline, PlainEngine, load_pipeline

PROMPT = "a large red circle in the centre"
EXACT = local_kernel("cpu", torch.float32)
FP8 = local_kernel("cpu", torch.float32, "fp8")


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionErrors:
    """Medians and maxima over all layers, and all steps, of a job."""

    layer_median: float
    layer_max: float
    step_median: float
    step_max: float
    latents: float
    """Error of the finished latents."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    with_prompt = [name for name in shipped_checkpoints() if not Checkpoint.open(name).defaults.min_pictures]
    parser.add_argument("models", nargs="*", default=with_prompt)
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    for name in arguments.models:
        checkpoint = Checkpoint.open(name, dtype=torch.float32)
        request = checkpoint.defaults.request(model=name, prompt=PROMPT, num_inference_steps=arguments.steps, seed=11)
        results[name] = asdict(attention_errors(load_pipeline(checkpoint), request))
        print(f"{name}: " + ", ".join(f"{key} {value:.4f}" for key, value in results[name].items()))
    print(json.dumps(results))


def attention_errors(pipeline: Pipeline, request: MediaRequest) -> AttentionErrors:
    """Return the errors in a job of ``request``. Its engine is a ``PlainEngine``, whose attention is exact again."""
    engine, sampler, layers = cast("PlainEngine", pipeline.engine), pipeline.sampler, list[float]()
    try:
        set_kernel(engine, noting(layers))
        *states, end = pipeline.states(request)
        steps: list[float] = []
        for state in states:
            branches = sampler.branches(state)
            set_kernel(engine, EXACT)
            exact = engine.predict(branches)
            set_kernel(engine, FP8)
            steps.extend(map(relative_difference, engine.predict(branches), exact))
        latents = pipeline.denoise(request)["latents"]
    finally:
        set_kernel(engine, EXACT)
    return AttentionErrors(
        layer_median=statistics.median(layers),
        layer_max=max(layers),
        step_median=statistics.median(steps),
        step_max=max(steps),
        latents=relative_difference(latents, sampler.latents(end)["latents"]),
    )


def set_kernel(engine: PlainEngine, kernel: Kernel) -> None:
    modules: Iterable[torch.nn.Module] = engine.model.modules.values()
    for module in modules:
        engine.model.set_kernel(module, kernel)


def noting(errors: list[float]) -> Kernel:
    """Return exact attention that adds to ``errors`` what float8 would have cost each call."""

    def noted(
        q_BLHD: Tensor,
        k_BMGD: Tensor,
        v_BMGD: Tensor,
        /,
        *,
        mask_BM: Tensor | None = None,
        prefix: Prefix | None = None,
    ) -> tuple[Tensor, Tensor]:
        exact = EXACT(q_BLHD, k_BMGD, v_BMGD, mask_BM=mask_BM, prefix=prefix)
        out_BLHD, _ = FP8(q_BLHD, k_BMGD, v_BMGD, mask_BM=mask_BM, prefix=prefix)
        errors.append(relative_difference(out_BLHD, exact[0]))
        return exact

    return noted


if __name__ == "__main__":
    main()
