"""Measurements belong to a version of the software."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch

from deployments.model_config import ModelConfig
from deployments.stages import measured_times
from pipelines.lora.source import LoraSource


def test_another_kernel_is_other_software(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = measured_times.software_facts()
    assert plain["torch"] == torch.__version__
    assert {"troupe", "torch", "diffusers", "transformers"} <= set(plain)
    monkeypatch.setattr(measured_times, "version", lambda name: plain.get(name, "0.0.3"))
    expected = {"triton", "fa3-fwd", "tensorrt", "tensorrt-rtx-cu13-libs"}
    assert measured_times.software_facts() == {**dict.fromkeys(expected, "0.0.3"), **plain}


def test_facts_are_known_without_the_software() -> None:
    heavy = ("torch", "diffusers", "transformers", "triton", "tensorrt")
    code = f"""
import sys
from deployments.stages.measured_times import software_facts
software_facts()
print([name for name in {heavy} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in (
        "model_index.json",
        "transformer/config.json",
        "transformer/weights.safetensors",
        "lora/a.safetensors",
        "loras/new/b.safetensors",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
        os.utime(path, (1000.0, 1000.0))
    return tmp_path


def replaced(path: Path) -> None:
    path.write_text(path.name)
    os.utime(path, (2000.0, 2000.0))


def facts_of(folder: Path) -> dict[str, str]:
    named = LoraSource(name="b", path=str(folder / "loras"), file="new/b.safetensors")
    model = ModelConfig(name="m", path=str(folder), loras=[LoraSource(path=str(folder / "lora")), named])
    return measured_times.model_facts(model, folder)


@pytest.mark.parametrize(
    ("changed", "is_other"),
    [
        ("transformer/weights.safetensors", True),
        ("transformer/config.json", True),
        ("lora/a.safetensors", True),
        ("loras/new/b.safetensors", True),
        ("README.md", False),
        ("transformer/log.out", False),
    ],
)
def test_weights_that_were_replaced_are_another_model(folder: Path, changed: str, is_other: bool) -> None:
    before = facts_of(folder)
    assert facts_of(folder) == before
    replaced(folder / changed)
    assert (facts_of(folder) != before) is is_other


def test_one_file_as_a_transformer_is_looked_at(folder: Path) -> None:
    file = folder / "alone.safetensors"
    replaced(file)
    model = ModelConfig(name="m", path=str(file), base=str(folder))
    before = measured_times.model_facts(model, folder)
    os.utime(file, (3000.0, 3000.0))
    assert measured_times.model_facts(model, folder) != before


def test_what_the_hub_has_is_the_same_whenever_it_was_downloaded(folder: Path) -> None:
    """Its cache links to files that are named by their content."""
    weights, blobs = folder / "transformer" / "weights.safetensors", folder / "blobs"
    blobs.mkdir()
    weights.rename(blobs / "00ff")
    weights.symlink_to(blobs / "00ff")
    before = facts_of(folder)
    os.utime(blobs / "00ff", (3000.0, 3000.0))
    assert facts_of(folder) == before
    (blobs / "00ff").rename(blobs / "11ff")
    weights.unlink()
    weights.symlink_to(blobs / "11ff")
    assert facts_of(folder) != before


def test_what_steps_need_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(measured_times, "version", missing)
    with pytest.raises(PackageNotFoundError, match="torch"):
        measured_times.software_facts()
