"""``troupe doctor`` on machines that this one is not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from deployments.cli import doctor

EVERYTHING = (*doctor.PACKAGES, *doctor.EXPORT_PACKAGES, doctor.NCCL_PACKAGES[0])


def host(monkeypatch: pytest.MonkeyPatch, *, installed: tuple[str, ...], num_gpus: int) -> dict[str, doctor.Finding]:
    """What the doctor finds on a host with just these packages and so many GPUs."""
    card = SimpleNamespace(name="NVIDIA B200", total_memory=180 << 30, major=10, minor=0)
    monkeypatch.setattr(doctor, "_version", lambda name: "11.2" if name in installed else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    return {found.subject: found for found in [*doctor._devices(), *doctor._engines()]}


def test_each_gpu_and_the_one_nccl_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = host(monkeypatch, installed=EVERYTHING, num_gpus=2)
    assert found["GPU 1"].found == "NVIDIA B200, 180 GiB, compute capability 10.0"
    assert found["NCCL"].found == "2.28.9 in torch; wheels: nvidia-nccl-cu13 11.2"
    assert (found["engine tensorrt"].found, found["engine tensorrt"].ok) == ("ready", True)


@pytest.mark.parametrize(
    ("missing", "told"), [("tensorrt", "needs tensorrt (pip"), ("onnxscript", "needs onnxscript (pip")]
)
def test_tensorrt_is_not_ready_without_what_it_exports_with(
    monkeypatch: pytest.MonkeyPatch, missing: str, told: str
) -> None:
    installed = tuple(name for name in EVERYTHING if name != missing)
    found = host(monkeypatch, installed=installed, num_gpus=1)["engine tensorrt"]
    assert told in found.found
    assert found.ok is False


def test_without_a_gpu_plans_can_be_built_and_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    found = host(monkeypatch, installed=EVERYTHING, num_gpus=0)
    assert found["GPU"].ok is False
    assert found["engine tensorrt"].found == "builds plans here; running them needs a GPU"
