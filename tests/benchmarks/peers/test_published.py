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


def test_both_projects_are_timed_for_the_same_models_but_the_one_that_vllm_omni_has_not() -> None:
    assert set(sglang_models.MODELS) - set(vllm_omni_models.MODELS) == {"Flux3Transformer2DModel"}
    assert set(vllm_omni_models.MODELS) <= set(sglang_models.MODELS)


def test_weights_of_flux3_have_the_names_of_its_checkpoints_and_one_dtype() -> None:
    names = (
        "mode_blocks.image.0.attn.norm_q.weight",
        "txt_mode_blocks.1.attn.to_out.0.weight",
        "single_transformer_blocks.2.attn.to_v.weight",
        "single_stream_modulations.txt.linear.weight",
        "target_timestep_embedder.linear_2.weight",
        "x_embedders.image_cond.weight",
        "proj_out.weight",
    )
    scale_shift = torch.tensor([[1.0], [2.0]], dtype=torch.bfloat16)
    weights = {name: torch.zeros(1) for name in names} | {"norm_out.linear.weight": scale_shift}
    found = sglang_models.flux3_weights(weights)
    assert found.pop("final_layer.image.adaLN_modulation.1.weight").flatten().tolist() == [2, 1]
    assert [*found] == [
        "content_mode_blocks.image.0.norm.query_norm.weight",
        "txt_mode_blocks.1.attn_out.weight",
        "single_blocks.2.v_proj.weight",
        "single_stream_modulations.txt.lin.weight",
        "ref_time_in.out_layer.weight",
        "emb_in.image_cond.weight",
        "final_layer.image.linear.weight",
    ]
    assert {weight.dtype for weight in found.values()} == {torch.bfloat16}


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
