"""Unknown peers and transformers are refused before anything of theirs is imported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.peers import published, sglang_models, vllm_omni_models
from benchmarks.peers.published import MAKERS, empty, peer_of


class Wan3DModel:
    """A transformer that no peer has."""


MODEL: Any = SimpleNamespace(module=Wan3DModel(), own_calls=())


def test_an_unknown_maker_is_told_the_known_ones() -> None:
    with pytest.raises(ValueError, match="known: vllm-omni"):
        peer_of(MODEL, "diffusers").__enter__()


@pytest.mark.parametrize("maker", MAKERS)
def test_an_unknown_transformer_is_told_the_known_ones_and_starts_nothing(maker: str) -> None:
    with pytest.raises(ValueError, match=r"Flux2Transformer2DModel, .* not for Wan3DModel"):
        peer_of(MODEL, maker).__enter__()
    assert not dist.is_initialized()


def test_both_projects_are_timed_for_the_same_models() -> None:
    assert set(sglang_models.MODELS) == set(vllm_omni_models.MODELS)


def test_a_peers_memory_is_free_whoever_holds_it_and_what_it_shares_is_whole() -> None:
    module, peer = torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)
    weight = module.weight
    peer.load_state_dict({**peer.state_dict(), "weight": module.state_dict()["weight"]}, assign=True)
    bias = peer.bias
    assert peer.weight.data_ptr() == weight.data_ptr()
    empty(peer)
    assert {tensor.numel() for tensor in (*peer.parameters(), *peer.buffers(), bias)} == {0}
    assert module.weight is weight
    assert weight.tolist() == [1, 1, 1]


def test_a_captured_step_shares_the_peer_of_the_eager_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another maker closes it first. One that could not be opened is opened again."""
    seen: list[str] = []

    @contextmanager
    def opened(_model: Any, maker: str) -> Iterator[Any]:
        seen.append(f"open {maker}")
        if maker == "broken":
            raise RuntimeError("no memory")
        yield lambda: maker
        seen.append(f"close {maker}")

    monkeypatch.setattr(published, "peer_of", opened)
    model: Any = SimpleNamespace(module=torch.nn.Linear(1, 1))
    with published.OpenPeer(model) as peer:
        assert peer.step("sglang") is peer.step("sglang")
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no memory"):
                peer.step("broken")
        assert peer.step("vllm-omni")() == "vllm-omni"
    assert seen == ["open sglang", "close sglang", "open broken", "open broken", "open vllm-omni", "close vllm-omni"]
