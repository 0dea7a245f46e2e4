"""The attention seam gives the same numbers as diffusers' processors, and can be compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from engines.core.attention import Kernel
from engines.core.model import DenoiserModel
from engines.parallel.local_attention import plain_attention
from tests.pipelines.support.checkpoints import tiny
from tests.pipelines.support.checkpoints.parts import shake

MakeModel = Callable[[], Any]


def flux_transformer() -> Any:
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    sizes = {"num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16, "num_attention_heads": 4}
    dims = {"in_channels": 16, "joint_attention_dim": 48, "pooled_projection_dim": 32, "axes_dims_rope": (4, 6, 6)}
    return shake(FluxTransformer2DModel(**sizes, **dims, guidance_embeds=True))


def wan_transformer() -> Any:
    return tiny.wan_transformer(seed=3)


def denoiser(name: str, transformer: Any) -> DenoiserModel:
    from tests.support.flux_denoiser import as_denoiser as as_flux
    from tests.support.wan_denoiser import as_denoiser as as_wan

    return as_flux(transformer) if name == "flux" else as_wan({"transformer": transformer})


MODELS: dict[str, MakeModel] = {"flux": flux_transformer, "wan": wan_transformer}
BLOCKS = {"flux": 4, "wan": 2}
TOKENS = {"flux": 82, "wan": 105}


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@torch.inference_mode()
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_prediction_equals_diffusers(name: str, dtype: torch.dtype, tolerance: float) -> None:
    theirs = MODELS[name]().to(dtype)
    model = denoiser(name, copy.deepcopy(theirs))
    for branch in model.probe():
        expected = theirs(**branch.inputs, return_dict=False)[0]
        prediction = model.forward(model.modules["transformer"], branch.inputs)
        assert expected.std() > 0.3
        torch.testing.assert_close(prediction, expected, rtol=0, atol=tolerance)


@torch.inference_mode()
def test_probe_is_the_same_every_time_and_has_two_different_branches(name: str) -> None:
    model = denoiser(name, MODELS[name]())
    first, second = model.probe(), model.probe()
    for ours, again in zip(first, second, strict=True):
        assert all(torch.equal(ours.inputs[key], again.inputs[key]) for key in ours.inputs)
    predictions = [model.forward(model.modules["transformer"], branch.inputs) for branch in first]
    assert (predictions[0] - predictions[1]).abs().max() > 0.01


@torch.inference_mode()
def test_set_kernel_reaches_every_self_attention(name: str) -> None:
    model = denoiser(name, MODELS[name]())
    branch, seen = model.probe()[0], []

    def recording(q_BLHD: Tensor, k_BMHD: Tensor, v_BMHD: Tensor, /) -> tuple[Tensor, Tensor]:
        seen.append((q_BLHD.shape, k_BMHD.shape, v_BMHD.shape))
        return plain_attention(q_BLHD, k_BMHD, v_BMHD)

    transformer = model.modules["transformer"]
    expected = model.forward(transformer, branch.inputs)
    model.set_kernel(transformer, cast(Kernel, recording))
    torch.testing.assert_close(model.forward(transformer, branch.inputs), expected, rtol=0, atol=1e-5)
    shape = (1, TOKENS[name], model.num_heads, model.head_dim)
    assert seen == [(shape, shape, shape)] * BLOCKS[name]
    assert sum(model.stream_lengths(branch.inputs).values()) == TOKENS[name]


@torch.inference_mode()
def test_a_silent_kernel_changes_the_prediction(name: str) -> None:
    """The comparisons above depend on self-attention."""
    model = denoiser(name, MODELS[name]())
    branch, transformer = model.probe()[0], model.modules["transformer"]
    expected = model.forward(transformer, branch.inputs)
    silent = cast(Kernel, lambda q, k, v: (torch.zeros_like(q), q[..., 0].transpose(1, 2)))
    model.set_kernel(transformer, silent)
    assert (model.forward(transformer, branch.inputs) - expected).abs().max() > 0.05


@torch.inference_mode()
@pytest.mark.parametrize("fused", [False, True])
def test_flux_heads_are_read_off_the_tensors(fused: bool) -> None:
    """Half of the heads' rows in q, k and v give half of the attention output, as in tensor parallelism."""
    model = denoiser("flux", flux_transformer())
    transformer: Any = model.modules["transformer"]
    block = transformer.single_transformer_blocks[0]
    hidden_BLC = torch.randn(1, 10, 64, generator=torch.Generator().manual_seed(1))
    whole_BLC = block.attn(hidden_BLC)
    half = copy.deepcopy(block.attn)
    for layer in (half.to_q, half.to_k, half.to_v):
        layer.weight, layer.bias = nn.Parameter(layer.weight[:32]), nn.Parameter(layer.bias[:32])
    if fused:
        half.fuse_projections()
    torch.testing.assert_close(half(hidden_BLC), whole_BLC[..., :32])


@torch.inference_mode()
def test_wan_cross_attention_reads_heads_off_the_tensors() -> None:
    model = denoiser("wan", wan_transformer())
    transformer: Any = model.modules["transformer"]
    attention = transformer.blocks[0].attn2
    half = copy.deepcopy(attention)
    half.norm_q = half.norm_k = attention.norm_q = attention.norm_k = nn.Identity()
    attention.to_out = half.to_out = nn.ModuleList([nn.Identity(), nn.Identity()])
    for layer in (half.to_q, half.to_k, half.to_v):
        layer.weight, layer.bias = nn.Parameter(layer.weight[:48]), nn.Parameter(layer.bias[:48])
    generator = torch.Generator().manual_seed(1)
    hidden_BLC, text_BTC = (torch.randn(1, length, 96, generator=generator) for length in (10, 7))
    torch.testing.assert_close(half(hidden_BLC, text_BTC), attention(hidden_BLC, text_BTC)[..., :48])


@torch.no_grad()
def test_blocks_export_without_float64_or_writes_in_place(name: str) -> None:
    model = denoiser(name, MODELS[name]())
    for block, arguments in captured_blocks(model, model.probe()[0].inputs):
        program = torch.export.export(block, arguments[0], arguments[1], strict=False)
        graph = program.run_decompositions().graph
        values = [node.meta["val"] for node in graph.nodes if isinstance(node.meta.get("val"), Tensor)]
        assert not [value for value in values if value.dtype == torch.float64]
        targets = [str(node.target) for node in graph.nodes]
        assert not [target for target in targets if "copy_" in target or "scatter" in target]
        expected = block(*arguments[0], **arguments[1])
        torch.testing.assert_close(program.module()(*arguments[0], **arguments[1]), expected, rtol=0, atol=1e-5)


def captured_blocks(model: DenoiserModel, inputs: Any) -> list[tuple[nn.Module, tuple[Any, Any]]]:
    """Return the first block of each kind with the arguments of a real forward."""
    transformer, captured = model.modules["transformer"], []
    for list_name in model.plan.blocks:
        block = getattr(transformer, list_name)[0]

        def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
            captured.append((module, (args, kwargs)))

        handle = block.register_forward_pre_hook(keep, with_kwargs=True)
        model.forward(transformer, inputs)
        handle.remove()
    return captured


@torch.no_grad()
def test_blocks_compile_into_one_graph(name: str) -> None:
    model = denoiser(name, MODELS[name]())
    transformer, inputs = model.modules["transformer"], model.probe()[0].inputs
    expected = model.forward(transformer, inputs)
    for list_name in model.plan.blocks:
        for block in getattr(transformer, list_name):
            block.compile(fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(model.forward(transformer, inputs), expected, rtol=0, atol=1e-4)
