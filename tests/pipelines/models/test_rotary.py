"""Queries and keys that are normalised and rotated in one operation, against diffusers' processors of attention."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
from diffusers.models.transformers.transformer_ltx2 import LTX2Attention, LTX2PerturbedAttnProcessor
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3Attention
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor
from torch import Tensor, nn

from engines.core.tensors import relative_difference
from engines.fast import rotary
from engines.parallel.collectives import Axis
from engines.parallel.local_attention import plain_attention
from engines.parallel.tensor import split_norm
from pipelines.blocks.attention import set_kernel
from pipelines.models.ltx2 import patches as ltx2
from pipelines.models.mini_max_h3 import patches as mini_max_h3
from pipelines.models.wan import attention as wan
from tests.pipelines.support.checkpoints.parts import shake

BATCH, LENGTH, CONTEXT, HEADS, DIM = 2, 7, 5, 3, 24
CHANNELS = HEADS * DIM
Tables = tuple[Tensor, Tensor]


class Case(NamedTuple):
    """An attention of diffusers, its inputs beside the tokens, and the module that has our processor of it."""

    attention: nn.Module
    inputs: dict[str, Any]
    patches: ModuleType
    num_operations: int = 1


def tables_of(*shape: int, doubled: bool = False) -> Tables:
    angles = torch.randn(shape, generator=torch.Generator().manual_seed(shape[-1] + len(shape)))
    return tuple(x.repeat_interleave(2, -1) if doubled else x for x in (angles.cos(), angles.sin()))  # type: ignore[return-value]


def by_head(length: int) -> Tables:
    """As LTX-2's embedding makes them: a view."""
    cos, sin = tables_of(BATCH, length, HEADS, DIM // 2)
    return cos.transpose(1, 2), sin.transpose(1, 2)


def ltx2_attention(**settings: Any) -> Any:
    return LTX2Attention(CHANNELS, heads=HEADS, kv_heads=HEADS, dim_head=DIM, **settings)


def ltx2_itself() -> Case:
    return Case(ltx2_attention(rope_type="split"), {"query_rotary_emb": by_head(LENGTH)}, ltx2)


def ltx2_gated() -> Case:
    processor = LTX2PerturbedAttnProcessor()
    attention = ltx2_attention(rope_type="interleaved", apply_gated_attention=True, processor=processor)
    return Case(attention, {"query_rotary_emb": tables_of(BATCH, LENGTH, CHANNELS // 2, doubled=True)}, ltx2)


def ltx2_cross() -> Case:
    inputs = {
        "encoder_hidden_states": torch.randn(BATCH, CONTEXT, 40, generator=torch.Generator().manual_seed(2)),
        "query_rotary_emb": by_head(LENGTH),
        "key_rotary_emb": by_head(CONTEXT),
    }
    return Case(ltx2_attention(rope_type="split", cross_attention_dim=40), inputs, ltx2, 2)


def wan_itself() -> Case:
    attention: Any = WanAttention(CHANNELS, heads=HEADS, dim_head=DIM, eps=1e-6, processor=WanAttnProcessor())
    return Case(attention, {"rotary_emb": tables_of(1, LENGTH, 1, DIM // 2, doubled=True)}, wan)


def minimax() -> Case:
    """A quarter of each head is not rotated."""
    cos, sin = tables_of(LENGTH, 3 * DIM // 8)
    rotary_emb = (torch.cat((cos, cos), 1), torch.cat((sin, sin), 1))
    return Case(MiniMaxH3Attention(CHANNELS, HEADS, DIM), {"rotary_emb": rotary_emb}, mini_max_h3)


CASES = [ltx2_itself, ltx2_gated, ltx2_cross, wan_itself, minimax]


class Heads(list[Tensor]):
    """Queries and keys that attention was called with."""

    def attend(self, q_BLHD: Tensor, k_BMHD: Tensor, v_BMHD: Tensor, /, **_: Any) -> tuple[Tensor, Tensor]:
        self += [q_BLHD, k_BMHD]
        return plain_attention(q_BLHD, k_BMHD, v_BMHD)


def replace_processor(case: Case, attention: nn.Module, heads: Heads) -> None:
    if case.patches is wan:
        wan.set_kernel(attention, heads.attend)
    else:
        case.patches.replace_processors(attention)
        set_kernel(attention, heads.attend)


def allow(case: Case, monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Use the operation on this CPU. Return what is called in place of ``rotated_heads``."""
    monkeypatch.setattr(case.patches, "is_fusable", lambda *_: True)
    called = Mock(side_effect=rotary.rotated_heads)
    monkeypatch.setattr(case.patches, "rotated_heads", called)
    return called


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-4)])
@pytest.mark.parametrize("make", CASES)
def test_heads_equal_diffusers(
    make: Callable[[], Case], dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make()
    theirs = shake(case.attention).to(dtype)
    ours, expected, got = copy.deepcopy(theirs), Heads(), Heads()
    x_BLC = torch.randn(BATCH, LENGTH, CHANNELS, generator=torch.Generator().manual_seed(1)).to(dtype)
    inputs = {name: x.to(dtype) if isinstance(x, Tensor) else x for name, x in case.inputs.items()}
    set_kernel(theirs, expected.attend)
    replace_processor(case, ours, got)
    out_BLC = theirs(x_BLC, **inputs)
    assert ours(x_BLC, **inputs).equal(out_BLC), "on a CPU nothing changes"
    got.clear()
    called = allow(case, monkeypatch)
    fused_BLC = ours(x_BLC, **inputs)
    assert called.call_count == case.num_operations
    assert relative_difference(fused_BLC, out_BLC) <= 10 * tolerance
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == dtype
        assert one.is_contiguous()
        assert relative_difference(one, other) <= tolerance


@torch.no_grad()
@pytest.mark.parametrize("make", CASES)
def test_it_is_an_operation_of_one_compiled_graph(make: Callable[[], Case], monkeypatch: pytest.MonkeyPatch) -> None:
    case, graphs = make(), list[torch.fx.GraphModule]()
    replace_processor(case, case.attention, Heads())
    allow(case, monkeypatch)
    monkeypatch.setattr(case.patches, "rotated_heads", rotary.rotated_heads)
    x_BLC = torch.randn(BATCH, LENGTH, CHANNELS)

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(case.attention.forward, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(x_BLC, **case.inputs), case.attention(x_BLC, **case.inputs))
    (graph,) = graphs
    targets = [str(node.target) for node in graph.graph.nodes]
    assert targets.count("troupe.rotated_heads.default") == case.num_operations


def on_gpu(**changes: Any) -> Any:
    return Mock(**{"is_cuda": True, "dtype": torch.bfloat16, **changes})


def test_other_norms_dtypes_devices_and_exports_keep_the_norms_and_the_rotation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rotary, "HAS_TRITON", True)
    norm, x_BLC = nn.RMSNorm(CHANNELS, eps=1e-6), on_gpu()
    assert rotary.is_fusable(x_BLC, norm, norm)
    assert rotary.is_fusable(on_gpu(dtype=torch.float16), norm)
    split = split_norm(norm, Axis(ranks=(0, 1), index=0))
    assert not rotary.is_fusable(x_BLC, norm, split)
    assert not rotary.is_fusable(on_gpu(dtype=torch.float32), norm)
    assert not rotary.is_fusable(on_gpu(is_cuda=False), norm)
    with monkeypatch.context() as patched:
        patched.setattr(torch.compiler, "is_exporting", lambda: True)
        assert not rotary.is_fusable(x_BLC, norm)
    monkeypatch.setattr(rotary, "HAS_TRITON", False)
    assert not rotary.is_fusable(x_BLC, norm)
