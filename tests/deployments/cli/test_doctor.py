"""``troupe doctor`` reports on simulated machines."""

from __future__ import annotations

import sys
from importlib.util import cache_from_source
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from deployments.cli import doctor
from deployments.cli.progress import console
from deployments.config import ShareConfig
from deployments.model_config import ModelConfig

EVERYTHING = (*doctor.PACKAGES, *doctor.EXPORT_PACKAGES, doctor.NCCL_PACKAGES[0])


def host(monkeypatch: pytest.MonkeyPatch, *, installed: tuple[str, ...], num_gpus: int) -> dict[str, doctor.Finding]:
    """Return the doctor's findings on a host with these packages and ``num_gpus`` GPUs."""
    card = SimpleNamespace(name="NVIDIA B200", total_memory=180 << 30, major=10, minor=0)
    monkeypatch.setattr(doctor, "_version", lambda name: "11.2" if name in installed else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    return {finding.subject: finding for finding in [*doctor._devices(), *doctor._engines()]}


def test_each_gpu_and_the_one_nccl_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = host(monkeypatch, installed=EVERYTHING, num_gpus=2)
    assert findings["GPU 1"].detail == "NVIDIA B200, 180 GiB, compute capability 10.0"
    assert findings["NCCL"].detail == "2.28.9 in torch; wheels: nvidia-nccl-cu13 11.2"
    assert (findings["engine tensorrt"].detail, findings["engine tensorrt"].ok) == ("ready", True)


@pytest.mark.parametrize(
    ("missing", "told"),
    [
        ("tensorrt", "needs tensorrt (pip install '.[gpu]')"),
        ("onnxscript", "needs onnxscript (pip install '.[export]')"),
        ("onnx-ir", "needs onnx-ir (pip install '.[export]')"),
    ],
)
def test_tensorrt_is_not_ready_without_what_it_exports_with(
    monkeypatch: pytest.MonkeyPatch, missing: str, told: str
) -> None:
    installed = tuple(name for name in EVERYTHING if name != missing)
    finding = host(monkeypatch, installed=installed, num_gpus=1)["engine tensorrt"]
    assert told in finding.detail
    assert finding.ok is False


def test_without_a_gpu_engines_can_be_built_and_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = host(monkeypatch, installed=EVERYTHING, num_gpus=0)
    assert findings["GPU"].ok is False
    assert findings["engine tensorrt"].detail == "builds engines here; running them needs a GPU"


def test_without_a_gpu_tensorrt_rtx_is_enough_to_build(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = tuple(name for name in EVERYTHING if name != "tensorrt")
    assert host(monkeypatch, installed=builder, num_gpus=0)["engine tensorrt"].detail.startswith("builds engines here")
    neither = tuple(name for name in builder if name != doctor.RTX)
    finding = host(monkeypatch, installed=neither, num_gpus=0)["engine tensorrt"]
    assert finding.detail == "needs tensorrt (pip install '.[rtx]')"


def test_models_that_share_gpus_are_told_with_what_fits_together() -> None:
    """The estimate has each model's default size, and three processes of a GiB on the first GPU."""
    models = [ModelConfig(name=name, share="main") for name in ("flux-shapes", "kontext-shapes", "wan-shapes")]
    everything = "flux-shapes + kontext-shapes + wan-shapes"
    told = doctor.share_report(models, ShareConfig())
    assert told.startswith(f"awake together: {everything}; asleep, their weights take up to 0.")
    assert told.endswith(" GiB of host memory")
    two = doctor.share_report(models, ShareConfig(memory_gib=7, host_memory_gib=0.01))
    assert "flux-shapes + kontext-shapes; or" in two
    assert everything not in two
    assert two.endswith(", of which 0.01 are pinned and the rest is read through the page cache, slower")
    assert "flux-shapes; or kontext-shapes; or wan-shapes;" in doctor.share_report(models, ShareConfig(memory_gib=4))


def bytecode(monkeypatch: pytest.MonkeyPatch, folder: Path, *, writes: bool) -> doctor.Finding:
    """Return the finding for an interpreter with bytecode in ``folder``, which it writes or not."""
    monkeypatch.setattr(sys, "pycache_prefix", str(folder))
    monkeypatch.setattr(sys, "dont_write_bytecode", not writes)
    (finding,) = doctor._bytecode()
    return finding


def test_bytecode_that_is_never_written_is_told_with_its_cost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    finding = bytecode(monkeypatch, tmp_path, writes=False)
    assert finding.ok is False
    assert "every start compiles the sources of its packages, about 8 s" in finding.detail
    assert "unset PYTHONDONTWRITEBYTECODE, or run `python -m compileall" in finding.detail
    assert str(Path(torch.__file__).parents[1]) in finding.detail
    assert "PYTHONPYCACHEPREFIX" not in finding.detail  # the variable by itself would change nothing


@pytest.mark.parametrize(
    ("writes", "told"),
    [
        (True, "To change that, set PYTHONPYCACHEPREFIX to a writable folder"),
        (False, "unset PYTHONDONTWRITEBYTECODE and set PYTHONPYCACHEPREFIX to a writable folder"),
    ],
)
def test_bytecode_that_cannot_be_written_wants_another_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, writes: bool, told: str
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch(mode=0o777)  # permissions are not the problem
    finding = bytecode(monkeypatch, in_the_way, writes=writes)
    assert finding.ok is False
    assert told in finding.detail
    assert f"{in_the_way}/" in finding.detail


def test_bytecode_that_the_first_start_writes_is_fine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert bytecode(monkeypatch, tmp_path / "to" / "be" / "made", writes=True).ok is True


def test_bytecode_that_is_there_is_fine_though_none_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))
    cached = Path(cache_from_source(torch.__file__))
    assert cached.is_relative_to(tmp_path)
    cached.parent.mkdir(parents=True)
    cached.touch()
    assert bytecode(monkeypatch, tmp_path, writes=False).ok is True


def test_the_report_shows_brackets_and_warns_of_bytecode_without_failing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "width", 600)
    monkeypatch.setattr(doctor, "_version", lambda name: None if name.startswith("tensorrt") else "11.2")
    bytecode(monkeypatch, tmp_path, writes=False)
    assert doctor.print_report() is True
    shown = capsys.readouterr().out
    assert "needs tensorrt (pip install '.[rtx]')" in shown
    assert "│ no  │ bytecode" in shown
