"""Queries and keys normalised and rotated in one operation equal diffusers' attention processors."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
from diffusers.models.attention_processor import Attention
from diffusers.models.normalization import RMSNorm
from diffusers.models.transformers.transformer_cosmos3 import Cosmos3PackedMoTAttention
from diffusers.models.transformers.transformer_helios import HeliosAttention, HeliosAttnProcessor
from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15AttnProcessor2_0
from diffusers.models.transformers.transformer_ltx import LTXAttention
from diffusers.models.transformers.transformer_ltx2 import LTX2Attention, LTX2PerturbedAttnProcessor
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3Attention
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor
from torch import Tensor, nn

from engines.core.attention import EarlyKernel, Kernel
from engines.core.tensors import relative_difference
from engines.fast import rotary
from engines.parallel.collectives import Axis
from engines.parallel.local_attention import plain_attention
from engines.parallel.tensor import split_norm
from pipelines.blocks import attention
from pipelines.models.cosmos import attention as cosmos
from pipelines.models.helios.spec import SPEC as HELIOS
from pipelines.models.hunyuan_video.attention import HunyuanVideoProcessor
from pipelines.models.ltx.spec import SPEC as LTX
from pipelines.models.ltx2.spec import SPEC as LTX2
from pipelines.models.mini_max_h3.spec import SPEC as MINIMAX
from pipelines.models.wan import attention as wan
from tests.pipelines.support.checkpoints.parts import shake

BATCH, LENGTH, CONTEXT, HEADS, DIM = 2, 7, 5, 3, 24
CHANNELS = HEADS * DIM
Tables = tuple[Tensor, Tensor]


class Case(NamedTuple):
    """An attention of diffusers, its inputs beside the tokens, and the function that sets our processor."""

    attention: nn.Module
    inputs: dict[str, Any]
    replace: Callable[[Any, Kernel], None]
    num_operations: int = 1


def tables_of(*shape: int, doubled: bool = False) -> Tables:
    angles = torch.randn(shape, generator=torch.Generator().manual_seed(shape[-1] + len(shape)))
    return tuple(x.repeat_interleave(2, -1) if doubled else x for x in (angles.cos(), angles.sin()))  # type: ignore[return-value]


def by_head(length: int) -> Tables:
    """Return views, as in LTX-2's embedding."""
    cos, sin = tables_of(BATCH, length, HEADS, DIM // 2)
    return cos.transpose(1, 2), sin.transpose(1, 2)


def ltx2_attention(**settings: Any) -> Any:
    return LTX2Attention(CHANNELS, heads=HEADS, kv_heads=HEADS, dim_head=DIM, **settings)


def ltx2_itself() -> Case:
    return Case(ltx2_attention(rope_type="split"), {"query_rotary_emb": by_head(LENGTH)}, LTX2.set_kernel)


def ltx2_gated() -> Case:
    processor = LTX2PerturbedAttnProcessor()
    attn = ltx2_attention(rope_type="interleaved", apply_gated_attention=True, processor=processor)
    return Case(attn, {"query_rotary_emb": tables_of(BATCH, LENGTH, CHANNELS // 2, doubled=True)}, LTX2.set_kernel)


def ltx2_cross() -> Case:
    inputs = {
        "encoder_hidden_states": torch.randn(BATCH, CONTEXT, 40, generator=torch.Generator().manual_seed(2)),
        "query_rotary_emb": by_head(LENGTH),
        "key_rotary_emb": by_head(CONTEXT),
    }
    return Case(ltx2_attention(rope_type="split", cross_attention_dim=40), inputs, LTX2.set_kernel, 2)


def ltx() -> Case:
    return Case(
        LTXAttention(CHANNELS, heads=HEADS, kv_heads=HEADS, dim_head=DIM),
        {"image_rotary_emb": tables_of(BATCH, LENGTH, CHANNELS // 2, doubled=True)},
        LTX.set_kernel,
    )


def wan_itself() -> Case:
    attn: Any = WanAttention(CHANNELS, heads=HEADS, dim_head=DIM, eps=1e-6, processor=WanAttnProcessor())
    return Case(attn, {"rotary_emb": tables_of(1, LENGTH, 1, DIM // 2, doubled=True)}, wan.set_kernel)


def minimax() -> Case:
    """Return an attention that does not rotate a quarter of each head."""
    cos, sin = tables_of(LENGTH, 3 * DIM // 8)
    rotary_emb = (torch.cat((cos, cos), 1), torch.cat((sin, sin), 1))
    return Case(MiniMaxH3Attention(CHANNELS, HEADS, DIM), {"rotary_emb": rotary_emb}, MINIMAX.set_kernel)


def helios() -> Case:
    attn: Any = HeliosAttention(CHANNELS, heads=HEADS, dim_head=DIM, processor=HeliosAttnProcessor())
    rotary_emb = torch.cat(tables_of(BATCH, LENGTH, DIM // 2, doubled=True), -1)
    return Case(attn, {"rotary_emb": rotary_emb}, HELIOS.set_kernel)


def hunyuan() -> Case:
    """Return an attention whose norm rounds before it multiplies by the weight."""
    attn = Attention(
        CHANNELS, heads=HEADS, dim_head=DIM, added_kv_proj_dim=CHANNELS, context_pre_only=False, bias=True,
        processor=HunyuanVideo15AttnProcessor2_0(), qk_norm="rms_norm", eps=1e-6,
    )  # fmt: skip
    inputs = {
        "encoder_hidden_states": torch.randn(BATCH, CONTEXT, CHANNELS, generator=torch.Generator().manual_seed(2)),
        "attention_mask": torch.ones(BATCH, CONTEXT, dtype=torch.bool),
        "image_rotary_emb": tables_of(LENGTH, DIM // 2, doubled=True),
    }
    return Case(attn, inputs, replace_hunyuan)


def replace_hunyuan(attn: Any, kernel: Kernel) -> None:
    attn.set_processor(HunyuanVideoProcessor(kernel))


CASES = [ltx2_itself, ltx2_gated, ltx2_cross, ltx, wan_itself, minimax, helios, hunyuan]


class Heads(list[Tensor]):
    """Queries and keys of an attention call."""

    def attend(self, q_BLHD: Tensor, k_BMHD: Tensor, v_BMHD: Tensor, /, **_: Any) -> tuple[Tensor, Tensor]:
        self += [q_BLHD, k_BMHD]
        return plain_attention(q_BLHD, k_BMHD, v_BMHD)

    def dispatch(self, query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        return self.attend(query, key, value)[0]


def allow(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Use the operation on this CPU. Return the mock called in its place."""
    for module in (attention, cosmos):
        monkeypatch.setattr(module, "is_fusable", lambda *_: True)
    called = Mock(side_effect=rotary._run)
    monkeypatch.setattr(rotary, "_run", called)
    return called


def check_heads(got: Heads, expected: Heads, tolerance: float) -> None:
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == other.dtype
        assert relative_difference(one, other) <= tolerance


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-4)])
@pytest.mark.parametrize("make", CASES)
def test_heads_equal_diffusers(
    make: Callable[[], Case], dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make()
    theirs: Any = shake(case.attention).to(dtype)
    ours, expected, got = copy.deepcopy(theirs), Heads(), Heads()
    x_BLC = torch.randn(BATCH, LENGTH, CHANNELS, generator=torch.Generator().manual_seed(1)).to(dtype)
    inputs = {name: x.to(dtype) if name.startswith("encoder") else x for name, x in case.inputs.items()}
    case.replace(ours, got.attend)
    with monkeypatch.context() as patched:
        patched.setattr(sys.modules[type(theirs.processor).__module__], "dispatch_attention_fn", expected.dispatch)
        theirs(x_BLC, **inputs)
    out = ours(x_BLC, **inputs)
    check_heads(got, expected, tolerance)
    got.clear()
    called = allow(monkeypatch)
    torch.testing.assert_close(ours(x_BLC, **inputs), out, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.03)
    assert called.call_count == case.num_operations
    check_heads(got, expected, tolerance)


@torch.no_grad()
@pytest.mark.parametrize("make", CASES)
def test_it_is_an_operation_of_one_compiled_graph(make: Callable[[], Case], monkeypatch: pytest.MonkeyPatch) -> None:
    case, graphs = make(), list[torch.fx.GraphModule]()
    case.replace(case.attention, Heads().attend)
    for module in (attention, cosmos):
        monkeypatch.setattr(module, "is_fusable", lambda *_: True)
    x_BLC = torch.randn(BATCH, LENGTH, CHANNELS)

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(case.attention.forward, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(x_BLC, **case.inputs), case.attention(x_BLC, **case.inputs))
    (graph,) = graphs
    targets = [str(node.target) for node in graph.graph.nodes]
    assert targets.count("troupe.rotated_heads.default") == case.num_operations


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-4)])
def test_heads_of_cosmos_are_the_same_in_one_pass(
    dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has fewer key heads than query heads, and a text without tokens here."""
    attn = shake(Cosmos3PackedMoTAttention(CHANNELS, DIM, 4, 2, False, 1e-6)).to(dtype)
    x_LC = torch.randn(LENGTH, CHANNELS, generator=torch.Generator().manual_seed(1)).to(dtype)
    tables = [torch.cat((table, table), -1).to(dtype) for table in tables_of(LENGTH, DIM // 2)]
    text_21TGD, expected, got = x_LC.new_empty(2, 1, 0, 2, DIM), Heads(), Heads()
    cosmos.GenerationProcessor(grouped(expected))(attn, text_21TGD, x_LC, (*tables, *tables))
    called = allow(monkeypatch)
    cosmos.GenerationProcessor(grouped(got))(attn, text_21TGD, x_LC, (*tables, *tables))
    assert called.call_count == 2
    check_heads(got, expected, tolerance)


def cosmos_itself() -> Case:
    def replace(attn: Any, kernel: Kernel) -> None:
        attn.set_processor(cosmos.GenerationProcessor(kernel))

    attn = Cosmos3PackedMoTAttention(CHANNELS, DIM, HEADS, HEADS, False, 1e-6)
    tables = [torch.cat((table, table), -1) for table in tables_of(LENGTH, DIM // 2)]
    text_21TGD = torch.randn(2, 1, CONTEXT, HEADS, DIM, generator=torch.Generator().manual_seed(2))
    return Case(attn, {"und_seq": text_21TGD, "rotary_emb": (*tables, *tables)}, replace)


@torch.no_grad()
@pytest.mark.parametrize("make", [wan_itself, minimax, ltx, ltx2_itself, ltx2_gated, cosmos_itself])
def test_keys_that_can_travel_early_are_sent_before_queries_are_made(
    make: Callable[[], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    case, events, heads = make(), list[str](), Heads()
    attn: Any = shake(case.attention)
    x_BLC = torch.randn(BATCH, LENGTH, CHANNELS, generator=torch.Generator().manual_seed(1))
    is_cosmos = make is cosmos_itself
    x = {"gen_seq": x_BLC[0]} if is_cosmos else {"hidden_states": x_BLC}
    case.replace(attn, heads.attend)
    expected = attn(**x, **case.inputs)

    def send(k_BMHD: Tensor, v_BMHD: Tensor, source: Tensor) -> Callable[[Tensor], Tensor]:
        assert source is next(iter(x.values()))
        events.append("keys and values")
        return lambda q_BLHD: heads.attend(q_BLHD, k_BMHD, v_BMHD)[0]

    case.replace(attn, EarlyKernel(attend=heads.attend, send=send))
    queries = attn.get_submodule("add_q_proj" if is_cosmos else "to_q")
    queries.register_forward_hook(lambda *_: events.append("queries"))
    allow(monkeypatch)
    torch.testing.assert_close(attn(**x, **case.inputs), expected)
    assert events == ["keys and values", "queries"]
    check_heads(Heads(heads[2:]), Heads(heads[:2]), 1e-6)


def grouped(heads: Heads) -> Any:
    """Return a kernel for fewer key heads than query heads."""
    return lambda q, *kv: heads.attend(q, *(x.repeat_interleave(2, dim=2) for x in kv))


@pytest.mark.parametrize("pairs", [DIM // 2, 9])
def test_compilers_know_the_strides_of_its_results(pairs: int) -> None:
    """They read results at the fake version's strides. Queries and keys are columns of wider rows here."""
    q_BLC, k_BLC, _ = torch.randn(BATCH, LENGTH, 3 * CHANNELS).chunk(3, -1)
    cos, sin = (x.transpose(1, 2)[..., ::2] for x in tables_of(BATCH, HEADS, LENGTH, 2 * pairs))
    norms = [torch.ones(DIM)] * 2
    torch.library.opcheck(rotary._run, ([q_BLC, k_BLC], norms, DIM, 1e-6, False, cos, sin, False, False, DIM))


def on_gpu(**changes: Any) -> Any:
    return Mock(**{"is_cuda": True, "dtype": torch.bfloat16, **changes})


def test_other_norms_dtypes_devices_and_exports_keep_the_norms_and_the_rotation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rotary, "HAS_TRITON", True)
    norm, x_BLC = nn.RMSNorm(CHANNELS, eps=1e-6), on_gpu()

    def attn(norm_k: nn.Module) -> Any:
        return SimpleNamespace(norm_q=norm, norm_k=norm_k)

    assert attention.can_rotate(attn(norm), x_BLC)
    assert attention.can_rotate(attn(norm), on_gpu(dtype=torch.float16))
    assert attention.can_rotate(attn(RMSNorm(DIM, 1e-6).bfloat16()), x_BLC)
    for other in (
        split_norm(norm, Axis(ranks=(0, 1), index=0)),
        nn.LayerNorm(CHANNELS),
        RMSNorm(DIM, 1e-6),  # its result would be float32
        RMSNorm(DIM, 1e-6, bias=True).bfloat16(),
    ):
        assert not attention.can_rotate(attn(other), x_BLC), other
    for x in (on_gpu(dtype=torch.float32), on_gpu(is_cuda=False)):
        assert not attention.can_rotate(attn(norm), x)
    with monkeypatch.context() as patched:
        patched.setattr(rotary, "is_exporting", lambda: True)
        assert not attention.can_rotate(attn(norm), x_BLC)
    monkeypatch.setattr(rotary, "HAS_TRITON", False)
    assert not attention.can_rotate(attn(norm), x_BLC)
