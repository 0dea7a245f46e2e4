"""Whole jobs on a fake GPU mix no devices, and a CUDA graph can record their steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from pipelines.checkpoint import Checkpoint
from pipelines.run import load_pipeline
from tests.pipelines import test_gpu_whole as gpu_whole
from tests.pipelines import test_whole_pipeline as whole
from tests.pipelines.support.checkpoints import tiny_flux3, tiny_minimax, tiny_whole
from tests.pipelines.support.device_jobs import DeviceRank
from tests.pipelines.support.pretend_gpu import GPU, GpuTensor
from tests.pipelines.support.pretended_jobs import RecordedStep, hoisted_again, pretended_gpu
from tests.pipelines.test_gpu_jobs import CASES

BOTH, SINGLE, HALF = ("float32", "bfloat16"), ("float32",), ("bfloat16",)
QUICK = {
    "ltx 2 in context, pictures too": SINGLE,
    "ltx 2 in two passes, guided": BOTH,
    "ltx 2 at frames, guided": SINGLE,
    "flux 3, two pictures": SINGLE,
    "flux 3, distilled": HALF,
    "ideogram 4": HALF,
    "minimax h3 with references, all": BOTH,
    "qwen control": BOTH,
    "sdxl control": BOTH,
    "cosmos, with sound from a clip": BOTH,
    "helios, a clip": BOTH,
    "wan 2.1 from a picture": HALF,
    "wan animate 2, distilled": HALF,
    "wan animate 2, two segments": SINGLE,
    "wan vace, two transformers": BOTH,
    "solver, wan, boundary": SINGLE,
}
"""Data types of a job in ``make test``: each family has both."""
JOBS = [
    pytest.param(name, dtype, id=f"{name}-{dtype}", marks=[] if dtype in QUICK.get(name, ()) else [pytest.mark.slow])
    for name in CASES
    if not name.startswith("offloaded")
    for dtype in BOTH
]
QUICK_WHOLE = (tiny_whole.aura_flow, tiny_whole.wan_over, tiny_whole.flux_controlled)
TOLERANCE = 1e-3
"""Relative: operations are decomposed there, and guidance scales other rounding up."""


def marked(values: Any, quick: Any) -> list[Any]:
    return [pytest.param(one, marks=[] if one in quick else [pytest.mark.slow]) for one in values]


@pytest.mark.parametrize(("name", "dtype"), JOBS)
def test_a_graph_can_record_the_steps_of_a_job(
    name: str, dtype: str, folders: Callable[[Any], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offloaded blocks are copied on streams, which this device lacks."""
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tiny_minimax.LOAD_PROCESSOR, lambda *_, **__: tiny_minimax.MiniMaxProcessor())
    monkeypatch.setattr(tiny_flux3.LOAD_PROCESSOR, lambda *_, **__: tiny_flux3.Flux3Processor())
    case, folder = CASES[name], folders(CASES[name].make)
    job = case.job(folder)
    with pretended_gpu() as gpu, hoisted_again() as again:
        rank = DeviceRank(
            Checkpoint.open(case.source(folder), GPU, getattr(torch, dtype)), compiled=False, fast=False, sends=False
        )
        with closing(rank.engine):
            (module, *_) = rank.engine._model.modules.values()
            assert all(isinstance(x.data, GpuTensor) for x in module.parameters())
            values = rank.denoise(job)
            rank.decode(values, job.request)
            assert rank.num_captured
        latents = job.read(values)
    assert gpu.found == []
    assert again == [], "blocks cast or move inputs at each step"
    if dtype == "float32":
        job.check(latents, TOLERANCE)


def test_a_replay_that_reads_no_new_inputs_is_found(folders: Callable[[Any], Path]) -> None:
    """The second of two jobs shows it, as on a GPU."""
    case = CASES["solver, flux, shift"]
    job = case.job(folders(case.make))

    def latents(checkpoint: Checkpoint) -> list[Any]:
        rank = DeviceRank(checkpoint, compiled=False, fast=False, sends=False)
        with closing(rank.engine):
            return [job.read(rank.denoise(one)) for one in (job, job.other)]

    with pretended_gpu():
        _, right = latents(Checkpoint(folders(case.make), GPU, torch.float32))
        with patch.object(RecordedStep, "inputs", lambda self, tensors: self.example):
            _, wrong = latents(Checkpoint(folders(case.make), GPU, torch.float32))
    job.other.check(right, TOLERANCE)
    with pytest.raises(AssertionError, match="latents"):
        job.other.check(wrong, TOLERANCE)


@pytest.mark.parametrize("make", marked(gpu_whole.MAKES, QUICK_WHOLE))
def test_pipelines_without_blocks_mix_no_devices(make: whole.Make, folders: Callable[[Any], Path]) -> None:
    folder = folders(make)
    settings, arguments = gpu_whole.SETTINGS.get(make, ({}, {}))
    with pretended_gpu():
        checkpoint = Checkpoint(folder, GPU, torch.float32)
        request = whole.request_of(checkpoint, **settings)
        frames = load_pipeline(checkpoint).run(request, whole.pictures_of(request))
    own = whole.frames_by(whole.own_pipeline(folder), request, **arguments)
    assert np.abs(frames.astype(int) - own).max() <= 1
