"""What a precision changes: nothing where it is the reference's own, little where it is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.model_step.precisions import Arguments, results_of
from pipelines.size import Size
from tests.pipelines.support.checkpoints import tiny_pictures, tiny_qwen


@pytest.mark.parametrize("make", [tiny_pictures.flux2_dev, tiny_qwen.qwen], ids=["flux2", "qwen"])
def test_few_bits_change_little(make: Callable[[Path], Path], tmp_path: Path) -> None:
    folder = str(make(tmp_path))
    asked = Arguments(precisions=("native", "fp8", "int8"), size=Size(width=96, height=64), tokens=20, steps=4)
    native, fp8, int8 = results_of(folder, asked, torch.device("cpu"), torch.float32)
    assert (native["prediction_error"], native["latents_error"]) == (0.0, 0.0)
    assert native["num_steps"] == 4
    for result in (fp8, int8):
        assert 1e-4 < result["prediction_error"] < 0.15
        assert 0 < result["latents_error"] < 0.15
    assert int8["latents_psnr_db"] > fp8["latents_psnr_db"] > 20
