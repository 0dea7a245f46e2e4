"""Attention in float8 is close to attention in float32, and FlashAttention-3 gets the right arguments.

The package's function is a plain one here, which restores the quantised values itself.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from engines.core.attention import Prefix
from engines.core.tensors import relative_difference
from engines.fast.fp8_heads import Fp8Inputs, fused_heads, quantise_heads
from engines.parallel import flash3, fp8_attention
from engines.parallel.fp8_attention import fp8_flash3, fp8_reference
from engines.parallel.local_attention import cpu_flash, local_kernel, plain_attention
from engines.parallel.strategies import merge
from engines.quantization.linear import FP8

REFERENCE = fp8_reference(plain_attention)
MAX_ERROR = 0.05
"""Bound for a layer of unit queries, keys and values: three mantissa bits."""


def qkv(dim: int = 64, heads: int = 4, key_heads: int = 2, offset: float = 0.0) -> list[Tensor]:
    """Return q, k and v. All keys of a head share a vector of ``offset`` times their spread."""
    generator = torch.Generator().manual_seed(3)
    q_BLHD = torch.randn(2, 7, heads, dim, generator=generator)
    k_BMGD, v_BMGD = torch.randn(2, 2, 33, key_heads, dim, generator=generator)
    return [q_BLHD, k_BMGD + offset * torch.randn(key_heads, dim, generator=generator), v_BMGD]


def mask_of(num_keys: int = 33) -> Tensor:
    """Return a mask with which the second picture attends to few keys."""
    mask_BM = torch.arange(num_keys).expand(2, -1) % 3 > 0
    return mask_BM & (torch.arange(num_keys) < torch.tensor([[num_keys], [9]]))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("offset", [0.0, 5.0])
def test_near_to_float32_whatever_keys_have_in_common(masked: bool, offset: float) -> None:
    given, mask_BM = qkv(offset=offset), mask_of() if masked else None
    out, lse = REFERENCE(*given, mask_BM=mask_BM)
    expected_out, expected_lse = plain_attention(*given, mask_BM=mask_BM)
    assert 1e-3 < relative_difference(out, expected_out) < MAX_ERROR
    assert relative_difference(lse, expected_lse) < 5e-3


def test_control_without_smoothing_is_far(monkeypatch: pytest.MonkeyPatch) -> None:
    given = qkv(offset=5.0)
    monkeypatch.setattr(Tensor, "mean", lambda x, dim: torch.zeros_like(x[:, 0]))
    assert relative_difference(REFERENCE(*given)[0], plain_attention(*given)[0]) > 2 * MAX_ERROR


def test_parts_of_the_keys_merge_to_the_whole() -> None:
    """Each part is smoothed by its own mean, which the log-sum-exp includes."""
    q, k, v = qkv(offset=5.0)
    parts = (REFERENCE(q, k[:, rows], v[:, rows]) for rows in (slice(0, 11), slice(11, None)))
    out, lse = merge(*next(parts), *next(parts))
    expected_out, expected_lse = plain_attention(q, k, v)
    assert relative_difference(out, expected_out) < MAX_ERROR
    assert relative_difference(lse, expected_lse) < 5e-3


def test_scales_are_powers_of_two_that_use_the_range() -> None:
    given = quantise_heads(*qkv())
    for descale_BG in (given.q_descale_BG, given.k_descale_BG, given.v_descale_BG):
        assert descale_BG.shape == (2, 2)
        assert descale_BG.dtype == torch.float32
        assert (descale_BG.log2() % 1 == 0).all()
    for x in given[:3]:
        assert x.dtype == FP8
        assert ((x.float().abs().amax((1, 3)) > 100) & (x.float().abs().amax((1, 3)) <= 448)).all()


def test_a_value_rounds_alike_beside_larger_ones() -> None:
    q, k, v = qkv()
    larger = torch.cat((v, 7.3 * v), dim=1)
    few, many = quantise_heads(q, k, v), quantise_heads(q, torch.cat((k, k), dim=1), larger)
    few_v, many_v = (each.v_BMGD.float() * each.v_descale_BG[:, None, :, None] for each in (few, many))
    is_normal = v.abs() > 2.0**-14 * larger.abs().max()
    assert is_normal.float().mean() > 0.99
    assert many_v[:, :33][is_normal].equal(few_v[is_normal])


@pytest.mark.parametrize("edge", ["zeros", "largest", "smallest"])
def test_extreme_values_stay_finite(edge: str) -> None:
    q, k, v = qkv()
    factor = {"zeros": 0.0, "largest": 1e15, "smallest": 1e-30}[edge]
    for x in REFERENCE(q, k, factor * v):
        assert x.isfinite().all()


def test_left_out_keys_have_no_influence() -> None:
    q, k, v = qkv(offset=5.0)
    mask_BM = mask_of()
    out, lse = REFERENCE(q, k, v, mask_BM=mask_BM)
    k, v = (x.masked_fill(~mask_BM[..., None, None], 1e4) for x in (k, v))
    other_out, other_lse = REFERENCE(q, k, v, mask_BM=mask_BM)
    assert other_out.equal(out)
    assert other_lse.equal(lse)


def test_a_query_without_keys_merges_to_nothing() -> None:
    out, lse = REFERENCE(*qkv(), mask_BM=mask_of() & torch.tensor([[True], [False]]))
    assert out.isfinite().all()
    assert (lse[1] == -torch.inf).all()
    assert lse[0].isfinite().all()


def test_prefixes_are_computed_as_they_were() -> None:
    given, prefix = qkv(), Prefix(torch.arange(7) + 1, torch.arange(33))
    assert REFERENCE(*given, prefix=prefix)[0].equal(plain_attention(*given, prefix=prefix)[0])


def test_cpus_have_the_reference_and_other_devices_say_so() -> None:
    kernel, given = local_kernel("cpu", torch.float32, "fp8"), qkv()
    assert kernel(*given)[0].equal(fp8_reference(cpu_flash)(*given)[0])
    assert local_kernel("cpu", torch.bfloat16, "fp8") is not local_kernel("cpu", torch.bfloat16)
    with pytest.raises(ValueError, match="attention: fp8 needs a Hopper GPU or a CPU, not meta"):
        local_kernel("meta", torch.float32, "fp8")


class Package:
    """Fake of fa3-fwd in float8, for heads of 64 and 128. Answers are ``times`` the right one."""

    def __init__(self, times: float = 1.0) -> None:
        self.times = times
        self.shapes: list[tuple[int, ...]] = []

    def flash_attn_func(self, q: Tensor, k: Tensor, v: Tensor, *, return_attn_probs: bool, **options: Any) -> Any:
        assert return_attn_probs
        return self._attended(q, k, v, None, **options)

    def flash_attn_with_kvcache(
        self, q: Tensor, k: Tensor, v: Tensor, *, cache_seqlens: Tensor, num_splits: int, **options: Any
    ) -> Any:
        assert options.pop("return_softmax_lse")
        mask_BM = torch.arange(k.shape[1]) < cache_seqlens[:, None]
        return (*self._attended(q, k, v, mask_BM, **options), None)

    def _attended(
        self, q: Tensor, k: Tensor, v: Tensor, mask_BM: Tensor | None, *, softmax_scale: float, **descales: Tensor
    ) -> tuple[Tensor, Tensor]:
        assert {x.dtype for x in (q, k, v)} == {FP8}
        assert all(descale.shape == (len(k), k.shape[2]) for descale in descales.values())
        if q.shape[-1] not in (64, 128):
            raise RuntimeError("This flash attention build does not support this head dim")
        self.shapes.append(tuple(q.shape))
        group = q.shape[2] // k.shape[2]
        q_BLHD = q.float() * descales["q_descale"].repeat_interleave(group, 1)[:, None, :, None]
        k_BMGD = k.float() * descales["k_descale"][:, None, :, None]
        v_BMGD = v.float() * descales["v_descale"][:, None, :, None]
        scaled = q_BLHD * softmax_scale * q.shape[-1] ** 0.5
        out, lse = plain_attention(scaled, k_BMGD, v_BMGD, mask_BM=mask_BM)
        return (self.times * out).bfloat16(), lse.nan_to_num(neginf=7.0)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Package:
    module: Any = ModuleType(flash3.MODULE)
    module.__spec__ = importlib.util.spec_from_loader(flash3.MODULE, None)
    package = Package(*getattr(request, "param", ()))
    module.flash_attn_func, module.flash_attn_with_kvcache = package.flash_attn_func, package.flash_attn_with_kvcache
    monkeypatch.setitem(sys.modules, flash3.MODULE, module)
    monkeypatch.setattr(fp8_attention, "MIN_MASKED_KEYS", 33)
    return package


ON_CPU = partial(fp8_flash3, plain_attention, REFERENCE, "cpu")


def plainly_fused(
    q: Tensor, k: Tensor, v: Tensor, order_BM: Tensor | None, num_keys_B: Tensor | None, *, dim: int
) -> Fp8Inputs:
    """Stand for ``fused_heads`` by the plain version."""
    if order_BM is None or num_keys_B is None:
        return quantise_heads(q, k, v, dim=dim)
    k, v = (x.take_along_dim(order_BM[..., None, None], 1) for x in (k, v))
    return quantise_heads(q, k, v, torch.arange(k.shape[1]) < num_keys_B[:, None], dim=dim)


@pytest.mark.parametrize("dim", [64, 128, 80])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_the_package_is_given_what_the_reference_computes(
    package: Package, dim: int, masked: bool, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of 80 are padded to 128."""
    if fused:
        monkeypatch.setattr(fp8_attention, "fused_heads", plainly_fused)
        monkeypatch.setattr(fp8_attention, "_prepare", fp8_attention._prepare_fused)
    kernel, given, mask_BM = ON_CPU(), [x.bfloat16() for x in qkv(dim, offset=2.0)], mask_of() if masked else None
    package.shapes.clear()
    out, lse = kernel(*given, mask_BM=mask_BM)
    assert package.shapes == [(2, 7, 4, 64 if dim == 64 else 128)]
    expected_out, expected_lse = REFERENCE(*given, mask_BM=mask_BM)
    assert out.shape == expected_out.shape
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected_out, rtol=0, atol=2e-2)
    torch.testing.assert_close(lse, expected_lse)


def test_without_keys_its_log_sum_exp_is_infinite(package: Package) -> None:
    _, lse = ON_CPU()(*(x.bfloat16() for x in qkv()), mask_BM=mask_of() & torch.tensor([[True], [False]]))
    assert (lse[1] == -torch.inf).all()


def test_other_calls_are_computed_in_the_models_dtype(package: Package) -> None:
    kernel, mask_BM, prefix = ON_CPU(), mask_of(), Prefix(torch.arange(7) + 1, torch.arange(33))
    package.shapes.clear()
    q, k, v = qkv()
    few = {"mask_BM": mask_BM[:, :32]}
    calls: list[tuple[list[Tensor], dict[str, Any]]] = [
        ([q, k, v], {"prefix": prefix}),
        ([q, k[:, :32], v[:, :32]], few),
        (qkv(160), {}),
    ]
    for given, options in calls:
        assert kernel(*given, **options)[0].equal(plain_attention(*given, **options)[0])
    assert package.shapes == []


def test_without_the_package_the_start_says_what_is_missing() -> None:
    with pytest.raises(ValueError, match=r"attention: fp8 needs a Hopper GPU .* leave attention out"):
        ON_CPU()


@pytest.mark.parametrize("package", [(1.1,)], indirect=True)
def test_a_wrong_answer_is_refused(package: Package) -> None:
    with pytest.raises(ValueError, match="this fa3-fwd computes no head dim in float8"):
        ON_CPU()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.skipif(importlib.util.find_spec(flash3.MODULE) is None, reason="needs fa3-fwd")
@pytest.mark.parametrize(
    ("dim", "key_heads", "masked"), [*itertools.product([64, 128], [8, 2], [False, True]), (80, 8, False)]
)
@pytest.mark.parametrize(("length", "num_keys"), [(4608, 4608), (77, 1333)])
def test_equal_to_the_reference_compiled_or_not(
    dim: int, key_heads: int, masked: bool, length: int, num_keys: int
) -> None:
    kernel = local_kernel("cuda", torch.bfloat16, "fp8")
    q_BLHD = torch.randn(2, length, 8, dim, device="cuda", dtype=torch.bfloat16)
    k_BMGD, v_BMGD = torch.randn(2, 2, num_keys, key_heads, dim, device="cuda", dtype=torch.bfloat16)
    mask_BM = torch.rand(2, num_keys, device="cuda") > 0.3 if masked else None
    expected_out, expected_lse = REFERENCE(q_BLHD, k_BMGD, v_BMGD, mask_BM=mask_BM)
    torch._dynamo.reset()
    with torch.inference_mode():
        for run in (kernel, torch.compile(kernel, fullgraph=True)):
            out, lse = run(q_BLHD, k_BMGD, v_BMGD, mask_BM=mask_BM)
            assert relative_difference(out, expected_out) < fp8_attention.MAX_DIFFERENCE
            torch.testing.assert_close(lse, expected_lse, rtol=0, atol=2e-2)


def on_gpu(heads: int, groups: int, dim: int, length: int, num_keys: int, batch: int = 2) -> list[Tensor]:
    """Return views as in a hand-ordered step, batch innermost. Keys of a head have much in common."""
    generator = torch.Generator("cuda").manual_seed(7)
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    if groups == heads and num_keys == length:
        q_BLHD, k_BMGD, v_BMGD = torch.randn(length, batch, 3, heads, dim, **options).transpose(0, 1).unbind(2)
    else:
        q_BLHD = torch.randn(length, batch, heads, dim, **options).transpose(0, 1)
        k_BMGD, v_BMGD = torch.randn(num_keys, batch, 2, groups, dim, **options).transpose(0, 1).unbind(2)
    k_BMGD += 3 * torch.randn(groups, dim, **options)
    return [q_BLHD, k_BMGD, v_BMGD]


def assert_same_heads(fused: Fp8Inputs, plain: Fp8Inputs) -> None:
    """Check that queries, values and factors have the same bits. Few keys differ, by one step: their mean is rounded
    otherwise.

    Their number depends on ties. One in fifty of nine keys lies amid two steps, one in 6,000 of a thousand: the mean of
    a few numbers with 8 bits is often a round one.
    """
    for name in ("q_BLHD", "v_BMGD", "q_descale_BG", "k_descale_BG", "v_descale_BG"):
        one, other = getattr(fused, name), getattr(plain, name)
        assert one.contiguous().view(torch.uint8).equal(other.contiguous().view(torch.uint8)), name
    got, expected = fused.k_BMGD.float(), plain.k_BMGD.float()
    assert ((got - expected).abs() <= (expected.abs() / 8).clamp(min=2.0**-9)).all()
    assert (got != expected).float().mean() < (1e-3 if got.shape[1] >= 100 else 1e-2)
    torch.testing.assert_close(fused.lse_shift_BHL, plain.lse_shift_BHL, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("heads", "groups", "dim", "padded", "length", "num_keys"),
    [
        (24, 24, 128, 128, 4608, 4608),
        (32, 8, 128, 128, 4096, 4173),
        (3, 3, 128, 128, 20000, 20000),
        (8, 2, 64, 64, 77, 1333),
        (6, 6, 80, 96, 100, 100),
        (4, 4, 192, 256, 9, 9),
        (2, 1, 128, 128, 1, 7),
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_fused_heads_equal_the_plain_ones(
    heads: int, groups: int, dim: int, padded: int, length: int, num_keys: int, masked: bool
) -> None:
    q, k, v = on_gpu(heads, groups, dim, length, num_keys)
    mask_BM = None
    if masked:
        mask_BM = torch.rand(2, num_keys, device="cuda") > 0.3
        mask_BM[1] &= torch.arange(num_keys, device="cuda") < 5
    expected, num_expected = fp8_attention._prepare(q, k, v, mask_BM, padded)
    got, num_got = fp8_attention._prepare_fused(q, k, v, mask_BM, padded)
    assert_same_heads(got, expected)
    if masked:
        assert num_got is not None
        assert num_expected is not None
        assert num_got.equal(num_expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_fused_heads_in_a_graph_read_new_inputs() -> None:
    given = on_gpu(24, 24, 128, 1000, 1000, batch=1)
    fused_heads(*given)  # loads the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = fused_heads(*given)
    for factor in (3.0, 1e-3):
        for x in given:
            x *= factor
        graph.replay()
        assert_same_heads(got, quantise_heads(*given))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.skipif(importlib.util.find_spec(flash3.MODULE) is None, reason="needs fa3-fwd")
def test_attention_on_a_gpu_takes_the_fused_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, launches = local_kernel("cuda", torch.bfloat16, "fp8"), list[int]()

    def counted(*given: Any, dim: int) -> Fp8Inputs:
        launches.append(1)
        return fused_heads(*given, dim=dim)

    monkeypatch.setattr(fp8_attention, "fused_heads", counted)
    given = on_gpu(24, 24, 128, 4608, 4608, batch=1)
    out, lse = kernel(*given)
    assert launches == [1]
    expected_out, expected_lse = REFERENCE(*given)
    assert relative_difference(out, expected_out) < fp8_attention.MAX_DIFFERENCE
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=2e-2)
