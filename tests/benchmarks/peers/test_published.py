"""Unknown peers and transformers are refused before anything of theirs is imported."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.models.published import PublishedModel
from benchmarks.peers import published, sglang_models, vllm_omni_models, xdit
from benchmarks.peers.published import MAKERS, XDIT, empty, layout_of, peer_of
from engines.core.spec import ParallelSpec
from pipelines.directory import read_config
from pipelines.loading import resolve_configuration
from tests.pipelines.support.checkpoints import tiny


class Wan3DModel:
    """A transformer that no peer has."""


MODEL: Any = SimpleNamespace(module=Wan3DModel(), own_calls=())


def test_an_unknown_maker_is_told_the_known_ones() -> None:
    with pytest.raises(ValueError, match="known: vllm-omni"):
        peer_of(MODEL, "diffusers").__enter__()


@pytest.mark.parametrize("maker", MAKERS)
def test_an_unknown_transformer_is_told_the_known_ones_and_starts_nothing(maker: str) -> None:
    with pytest.raises(ValueError, match=r"FluxTransformer2DModel,.* not for Wan3DModel"):
        peer_of(MODEL, maker).__enter__()
    assert not dist.is_initialized()


def test_xdit_s_attention_is_that_of_every_block_and_its_parts_are_put_together(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = PublishedModel.made(str(tiny.flux(tmp_path)), torch.device("cpu"), torch.float32, num_tokens=8)
    expected, calls = model.call(), list[torch.Size]()

    def attend(q_BHLD: torch.Tensor, k_BHLD: torch.Tensor, v_BHLD: torch.Tensor) -> torch.Tensor:
        calls.append(q_BHLD.shape)
        return torch.nn.functional.scaled_dot_product_attention(q_BHLD, k_BHLD, v_BHLD)

    monkeypatch.setattr(xdit, "_attention", lambda _: attend)
    monkeypatch.setattr(type(model.module), "compile_repeated_blocks", lambda *_, **__: None)
    for name, value in (("is_initialized", True), ("get_world_size", 1), ("get_rank", 0)):
        monkeypatch.setattr(dist, name, lambda value=value: value)
    monkeypatch.setattr(dist, "all_gather", lambda every, x: every[0].copy_(x))
    with peer_of(model, XDIT) as step:
        assert torch.allclose(step(), expected, atol=1e-5)
    assert len(calls) == len(model.module.transformer_blocks) + len(model.module.single_transformer_blocks)


def test_both_projects_are_timed_for_the_same_models_but_those_that_one_has_not() -> None:
    assert set(sglang_models.MODELS) - set(vllm_omni_models.MODELS) == {"Flux3Transformer2DModel"}
    assert set(vllm_omni_models.MODELS) - set(sglang_models.MODELS) == {"HunyuanVideo15Transformer3DModel"}


def test_weights_of_flux3_have_the_names_of_its_checkpoints() -> None:
    names = (
        "mode_blocks.image.0.attn.norm_q.weight",
        "txt_mode_blocks.1.attn.to_out.0.weight",
        "single_transformer_blocks.2.attn.to_v.weight",
        "single_stream_modulations.txt.linear.weight",
        "target_timestep_embedder.linear_2.weight",
        "x_embedders.image_cond.weight",
        "proj_out.weight",
    )
    scale_shift = torch.tensor([[1.0], [2.0]])
    weights = {name: torch.zeros(1) for name in names} | {"norm_out.linear.weight": scale_shift}
    found = sglang_models.flux3_weights(SimpleNamespace(state_dict=lambda: weights))
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


@pytest.mark.parametrize("precision", ["native", "fp8"])
def test_peers_with_precisions_get_the_one_that_is_asked_for(monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    """Tensor parallelism divides only weights. Branches are on the ranks one after the other."""
    asked: list[Any] = []

    def transformer_of(*words: Any) -> Any:
        asked.append(words[1:])
        return torch.nn.Linear(1, 1), lambda _, own: lambda: torch.tensor([own["x"], torch.is_inference_mode_enabled()])

    group = SimpleNamespace(all_gather=lambda x: x)
    monkeypatch.setattr(importlib, "import_module", lambda _: SimpleNamespace(get_cfg_group=lambda: group))
    for name, value in (("is_initialized", True), ("get_world_size", 2), ("get_rank", 1)):
        monkeypatch.setattr(dist, name, lambda value=value: value)
    for project in (sglang_models, vllm_omni_models):
        monkeypatch.setattr(project, "transformer_of", transformer_of)
        monkeypatch.setitem(project.MODELS, "Linear", ())
    module: Any = torch.nn.Linear(1, 1)
    module.config = {"num_attention_heads": 2}
    calls = ({"x": 5}, {"x": 6})
    expected = {"sglang-blocks": ParallelSpec(guidance=2), "vllm-omni-tensor": ParallelSpec(tensor=2)}
    for maker, layout in expected.items():
        model: Any = SimpleNamespace(module=module, branches=(1, 2), own_calls=calls)
        with peer_of(model, maker, precision) as step:
            assert step().tolist() == ([6, 1] if layout.guidance == 2 else [5, 1, 6, 1])
        assert asked.pop() == (maker, layout, precision)


def test_a_captured_step_shares_the_peer_of_the_eager_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another maker closes it first. A failed one is opened again."""
    seen: list[str] = []

    @contextmanager
    def opened(_model: Any, maker: str, precision: str) -> Iterator[Any]:
        assert precision == "fp8"
        seen.append(f"open {maker}")
        if maker == "broken":
            raise RuntimeError("no memory")
        yield lambda: maker
        seen.append(f"close {maker}")

    monkeypatch.setattr(published, "peer_of", opened)
    model: Any = SimpleNamespace(module=torch.nn.Linear(1, 1))
    with published.OpenPeer(model, "fp8") as peer:
        assert peer.step("sglang") is peer.step("sglang")
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no memory"):
                peer.step("broken")
        assert peer.step("vllm-omni")() == "vllm-omni"
    assert seen == ["open sglang", "close sglang", "open broken", "open broken", "open vllm-omni", "close vllm-omni"]


@pytest.mark.parametrize(
    ("name", "num_branches", "num_ranks", "expected"),
    [
        ("FLUX.2-dev", 1, 1, {}),
        ("FLUX.2-dev", 1, 4, {"ulysses": 4}),
        ("Z-Image-Turbo", 1, 2, {"ulysses": 2}),
        ("Z-Image-Turbo", 1, 4, {"ulysses": 2, "ring": 2}),  # 30 heads
        ("Qwen-Image", 2, 1, {}),
        ("Qwen-Image", 2, 2, {"guidance": 2}),
        ("Qwen-Image", 2, 4, {"guidance": 2, "ulysses": 2}),
        ("Cosmos3-Nano", 1, 16, {"ulysses": 8, "ring": 2}),  # 32 heads, eight with keys of their own
        ("LTX-2", 1, 2, {"ulysses": 2}),
        ("MiniMax-H3", 1, 16, {"ulysses": 8, "ring": 2}),  # 56 heads
        ("HunyuanVideo-1.5-480p_t2v", 2, 4, {"guidance": 2, "ulysses": 2}),
    ],
)
def test_branches_come_first_then_heads(name: str, num_branches: int, num_ranks: int, expected: dict[str, Any]) -> None:
    config = read_config(resolve_configuration(name), "transformer")
    layout = layout_of(config, num_branches, num_ranks)
    assert layout == ParallelSpec(**expected)
    assert layout.num_ranks == num_ranks
