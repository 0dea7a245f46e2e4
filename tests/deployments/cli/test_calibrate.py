"""``troupe calibrate`` writes scales, and a rank reads them from the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from typer.testing import CliRunner

from deployments.cli.build import model_over
from deployments.cli.main import app
from deployments.model_config import ModelConfig
from deployments.stages.rank import LoadRankParts
from deployments.stages.stage_config import DenoiserConfig
from engines.core.engine import RankContext
from engines.core.tensors import relative_difference
from engines.quantization.calibration import recording_all
from pipelines.checkpoint import Checkpoint
from tests.pipelines.support.checkpoints import tiny_video


def prediction(folder: Path, **options: Any) -> torch.Tensor:
    config = DenoiserConfig(num_ranks=1, **options)
    make = LoadRankParts(model=ModelConfig(name="pictures", path=str(folder), denoiser=config))
    engine = make(RankContext(rank=0, num_ranks=1, device="cpu"))().engine
    checkpoint = Checkpoint(folder)
    (predicted,) = engine.predict(checkpoint.first_step(checkpoint.defaults.request()), (0,))
    engine.close()
    return predicted


def test_what_the_command_writes_a_rank_takes(pictures: Path, tmp_path: Path) -> None:
    prompts, scales = tmp_path / "prompts.txt", tmp_path / "scales.json"
    prompts.write_text("a red circle\na blue star\n")
    args = ["calibrate", "--model", str(pictures), "--out", str(scales), "--prompts", str(prompts)]
    done = CliRunner().invoke(app, args, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "2 prompts" in done.output

    native = prediction(pictures)
    fixed = prediction(pictures, precision="fp8-static", torch={"calibration": str(scales)})
    assert 1e-4 < relative_difference(fixed, native) < 0.1

    document = json.loads(scales.read_text())
    too_small = {"transformer": {name: amax / 50 for name, amax in document["transformer"].items()}}
    scales.write_text(json.dumps(too_small))
    cut_off = prediction(pictures, precision="fp8-static", torch={"calibration": str(scales)})
    assert relative_difference(cut_off, native) > 2 * relative_difference(fixed, native)


def test_a_file_that_cannot_be_written_is_told_before_the_model_is_read(tmp_path: Path) -> None:
    args = ["calibrate", "--model", "nowhere", "--out"]
    (file := tmp_path / "file").touch()
    for out, reason in ((tmp_path, f"{tmp_path} is a folder"), (file / "scales.json", f"{file} cannot be written")):
        refused = CliRunner().invoke(app, [*args, str(out)], env={"COLUMNS": "200"})
        assert (refused.exit_code, reason in refused.stderr) == (2, True), refused.output


def test_a_model_that_must_have_pictures_gets_some(tmp_path: Path) -> None:
    """Both transformers of a two-expert model are recorded."""
    checkpoint = Checkpoint(tiny_video.wan_picture_two_experts(tmp_path))
    model, run = model_over(("a red circle",), checkpoint, "32x32x5")
    with recording_all(model) as records:
        run()
    assert records.keys() == {"transformer", "transformer_2"}


@pytest.mark.parametrize("options", [{"precision": "fp8-static"}, {"torch": {"calibration": "scales.json"}}])
def test_fixed_scales_and_their_precision_belong_together(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="int8-static need a file that `troupe calibrate` wrote"):
        DenoiserConfig(**options)
