"""The software that what was measured belongs to."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest
import torch

from deployments.stages.gang import facts


def test_another_kernel_is_other_software(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = facts.software_facts()
    assert plain["torch"] == torch.__version__
    assert set(plain) == {"troupe", "torch", "diffusers"}, "fa3-fwd is for GPUs, and not installed here"
    monkeypatch.setattr(facts, "version", lambda name: "0.0.3" if name == "fa3-fwd" else plain[name])
    assert facts.software_facts() == {**plain, "fa3-fwd": "0.0.3"}


def test_what_steps_need_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(facts, "version", missing)
    with pytest.raises(PackageNotFoundError, match="torch"):
        facts.software_facts()
