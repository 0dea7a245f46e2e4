"""Precision and mode of each peer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.peers import step as peers


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Arguments of projects that have precisions. Their steps return whether they run in inference mode."""
    asked: list[dict[str, Any]] = []

    def make(_module: Any, _inputs: Any, **how: Any) -> Any:
        asked.append(how)
        return lambda: torch.tensor(torch.is_inference_mode_enabled())

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(peers, "sglang_step", make)
    monkeypatch.setattr(peers, "vllm_omni_step", make)
    return asked


@pytest.mark.parametrize("precision", ["native", "fp8"])
def test_peers_with_float8_get_the_precision_that_a_case_names(steps: list[dict[str, Any]], precision: Any) -> None:
    for maker in ("sglang-blocks", "vllm-omni-tensor"):
        assert peers.peer_step(None, {}, maker, precision)()
    assert steps == [
        {"compiled": "blocks", "precision": precision},
        {"compiled": True, "tensor": True, "precision": precision},
    ]


@pytest.mark.parametrize("maker", ["xdit", "diffusers-ulysses"])
def test_peers_without_float8_are_not_passed_off_as_such(monkeypatch: pytest.MonkeyPatch, maker: str) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match="not in fp8"):
        peers.peer_step(None, {}, maker, "fp8")
