"""``troupe build-engine`` works with the real builder, and so does ``troupe doctor --tensorrt``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from deployments.cli.main import app
from engines.tensorrt_engine.build.bindings import load_bindings
from tests.deployments.support.commands import command
from tests.engines.tensorrt_engine.conftest import translations
from tests.pipelines.support.checkpoints import tiny

__all__ = ["translations"]

CROSS_COMPILES = hasattr(load_bindings().api, "ComputeCapability")
needs_cross_compiler = pytest.mark.skipif(not CROSS_COMPILES, reason="this TensorRT builds for the GPU it runs on")
pytestmark = needs_cross_compiler


def invoke(*args: str) -> Result:
    return CliRunner().invoke(app, list(args), env={"COLUMNS": "200"})


def build(folder: Path, model: str, *args: str) -> Result:
    return invoke("build-engine", "--model", model, "--target", "sm89", "--cache-dir", str(folder), *args)


def test_says_what_the_file_holds_and_finds_it_again(tmp_path: Path, tiny_model: Path) -> None:
    """Configuration alone and loaded weights give the same file."""
    args = ("--strategy", "ulysses", "--ranks", "2", "--dtype", "float16", "--size", "64x64")
    first = build(tmp_path, str(tiny_model), *args)
    assert first.exit_code == 0, first.output
    for told in ("ulysses2, 2 ranks, float16, sm89", "1 all_gather, 8 all_to_all", "attentions    4, fused: 4"):
        assert told in first.output
    for told in ("hidden_states 1×32×16 FLOAT16", "MiB", "built in"):
        assert told in first.output
    (engine_file,) = tmp_path.glob("*.engine")
    assert str(engine_file) in first.output
    again = build(tmp_path, str(tiny_model), *args, "--calibrate", "--prompts", str(one_prompt(tmp_path)))
    assert "found in the cache" in again.output, again.output
    assert "calibrated transformer on 1 prompts" in again.output


def one_prompt(folder: Path) -> Path:
    file = folder / "prompts.txt"
    file.write_text("\na red circle\n\n")
    return file


QUANTIZED = ("--precision", "int8-static", "--weights", "constants", "--ranks", "2", "--dtype", "float16")


def test_quantized_needs_a_record(tmp_path: Path, tiny_model: Path) -> None:
    refused = build(tmp_path, str(tiny_model), *QUANTIZED, "--size", "64x64")
    assert refused.exit_code == 2
    assert "build-engine --precision int8-static --calibrate" in refused.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "shown"),
    [
        (("64x64",), "hidden_states 1×32×16 FLOAT16"),
        (("64x64", "32x64"), "hidden_states 1×16–32×16 FLOAT16"),
    ],
)
def test_calibrated_constants(tmp_path: Path, tiny_model: Path, sizes: tuple[str, ...], shown: str) -> None:
    wanted = [option for size in sizes for option in ("--size", size)]
    made = build(tmp_path, str(tiny_model), *QUANTIZED, *wanted, "--calibrate", "--prompts", str(one_prompt(tmp_path)))
    assert made.exit_code == 0, made.output
    assert "weights       constants" in made.output
    assert shown in made.output


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.flux(tmp_path_factory.mktemp("flux"))


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("--strategy", "tensor2xulysses2", "--ranks", "4"), "Use tensor4 or ulysses4 alone, or engine: torch"),
        (("--strategy", "tensor", "--ranks", "2", "--weights", "constants"), "use weights: inputs"),
        (("--precision", "fp4"), "the TensorRT engine knows auto"),
        (("--precision", "fp16"), "native computes in the model's dtype, so set that to float16"),
        (("--ranks", "8", "--strategy", "ulysses"), "leaves 1 of 8 heads on a rank"),
        (("--size", "100x100"), "must be positive multiples of 16"),
        (("--size", "large"), "write it as WIDTHxHEIGHT"),
        (("--target", "h100"), "write it as sm80, sm89, sm90"),
        (("--target", "sm90"), "not for sm90"),
        (("--model", "nonsense"), "no model 'nonsense'"),
    ],
)
def test_refusals_come_at_once_with_reason_and_alternative(tmp_path: Path, args: tuple[str, ...], told: str) -> None:
    result = build(tmp_path, "flux-shapes", *args)
    assert result.exit_code == 2, result.output
    assert told in " ".join(result.output.split())
    assert not list(tmp_path.glob("*.engine"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a device")
def test_without_a_gpu_the_target_must_be_named() -> None:
    result = invoke("build-engine", "--model", "flux-shapes")
    assert result.exit_code == 2
    assert "there is no GPU here to build for" in result.output


@pytest.mark.parametrize("while_it", ["exports", pytest.param("builds", marks=pytest.mark.slow)])
def test_interrupt_ends_it_cleanly(tmp_path: Path, while_it: str) -> None:
    folder = tmp_path / "engines"
    args = ("build-engine", "--model", "flux-shapes", "--target", "sm89", "--ranks", "2", "--cache-dir", str(folder))
    with command(*args, folder=tmp_path, env={}) as running:
        running.wait_for("exporting" if while_it == "exports" else "Building|[Bb]uild")
        assert running.interrupt() == 130
    left = {path.suffix for path in folder.rglob("*")} if folder.exists() else set()
    assert left <= {".lock", ".timing"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("model", "exchanges", "fused"),
    [("FLUX.1-dev", "1 all_gather, 114 all_to_all", 57), ("Wan2.1-T2V-14B", "1 all_gather, 80 all_to_all", 80)],
)
def test_full_size_by_configuration_alone(tmp_path: Path, model: str, exchanges: str, fused: int) -> None:
    """The weights exist neither on disk nor in memory."""
    result = build(tmp_path, model, "--ranks", "4", "--strategy", "ulysses")
    assert result.exit_code == 0, result.output
    assert exchanges in result.output
    assert f"fused: {fused}" in result.output


def test_values_of_weights_are_asked_for_where_they_matter(tmp_path: Path) -> None:
    result = build(tmp_path, "FLUX.1-dev", "--weights", "constants")
    assert result.exit_code == 2
    assert "no model 'FLUX.1-dev'" in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a device")
def test_doctor_proves_the_builder_and_names_what_needs_a_gpu() -> None:
    result = invoke("doctor", "--tensorrt")
    assert result.exit_code == 0, result.output
    assert result.output.count("proved") == 9, "TensorRT and its eight collectives"
    assert result.output.count("no GPU on this host") == 3


def test_doctor_tries_no_model_that_is_not_there() -> None:
    result = invoke("doctor", "--tensorrt", "--model", "nonsense")
    assert result.exit_code == 2
    assert "no model 'nonsense'" in result.output
