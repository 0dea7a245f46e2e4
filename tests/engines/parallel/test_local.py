import pytest
import torch

from engines.core.attention import Kernel, Prefix
from engines.parallel.local_attention import (
    cpu_flash,
    crop_keys,
    cuda_efficient,
    cuda_flash,
    cudnn_flash,
    local_kernel,
    plain_attention,
)
from engines.parallel.strategies import merge


def qkv(
    length: int, num_keys: int, dtype: torch.dtype = torch.float32, heads: int = 3, key_heads: int = 3, dim: int = 16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((length, heads), (num_keys, key_heads), (num_keys, key_heads))
    q, k, v = (torch.randn(2, n, h, dim, generator=generator).to(dtype) for n, h in sizes)
    return q, k, v


def in_float64(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    prefix: Prefix | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None], -torch.inf)
    if prefix is not None:
        for query, reach in enumerate(prefix.reach_L):
            scores[:, :, query, prefix.place_M >= reach] = -torch.inf
    return (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1)


MASK = torch.tensor([[True] * 5 + [False] * 6 + [True] * 2, [False, True, *[False] * 11]])


@pytest.mark.parametrize("kernel", [cpu_flash, plain_attention])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_out_and_lse(kernel: Kernel, dtype: torch.dtype, bound: float) -> None:
    given = qkv(7, 13, dtype)
    out, lse = kernel(*given)
    expected_out, expected_lse = in_float64(*given)
    assert out.shape == given[0].shape
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected_out, rtol=0, atol=bound)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=bound)


@pytest.mark.parametrize("kernel", [cpu_flash, plain_attention])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(("heads", "key_heads"), [(6, 6), (6, 3), (6, 1)])
@pytest.mark.parametrize("mask", [None, MASK], ids=["all keys", "masked"])
def test_grouped_heads_and_masked_keys(
    kernel: Kernel, dtype: torch.dtype, bound: float, heads: int, key_heads: int, mask: torch.Tensor | None
) -> None:
    given = qkv(7, 13, dtype, heads, key_heads)
    out, lse = kernel(*given, mask_BM=mask)
    expected_out, expected_lse = in_float64(*given, mask)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected_out, rtol=0, atol=bound)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=bound)


PREFIX = Prefix(torch.tensor([1, 2, 13, 5, 5, 13, 13]), torch.tensor([12, 0, 2, 1, *range(3, 12)]))
"""A prefix of seven queries, and of thirteen keys in no order."""


@pytest.mark.parametrize("kernel", [cpu_flash, plain_attention])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("mask", [None, MASK], ids=["all keys", "masked"])
def test_a_query_sees_as_far_as_it_reaches(
    kernel: Kernel, dtype: torch.dtype, bound: float, mask: torch.Tensor | None
) -> None:
    given, seen = qkv(7, 13, dtype, 6, 3), mask
    if mask is not None:
        seen = mask | (PREFIX.place_M == 0)  # one key for all queries
    out, lse = kernel(*given, mask_BM=seen, prefix=PREFIX)
    expected_out, expected_lse = in_float64(*given, seen, PREFIX)
    torch.testing.assert_close(out.double(), expected_out, rtol=0, atol=bound)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=bound)
    assert not torch.allclose(out, kernel(*given, mask_BM=seen)[0], atol=10 * bound)


@pytest.mark.parametrize("kernel", [cpu_flash, plain_attention])
def test_a_query_that_reaches_nothing_merges_to_nothing(kernel: Kernel) -> None:
    q, k, v = qkv(7, 13)
    out, lse = kernel(q, k, v, prefix=Prefix(torch.tensor([0, *[13] * 6]), torch.arange(13)))
    assert (lse[:, :, 0] == -torch.inf).all()
    assert lse[:, :, 1:].isfinite().all()
    other = kernel(q, k, v)
    merged_out, merged_lse = merge(out, lse, *other, masked=True)
    torch.testing.assert_close(merged_out[:, 0], other[0][:, 0])
    torch.testing.assert_close(merged_lse[:, :, 0], other[1][:, :, 0])


@pytest.mark.parametrize("kernel", [cpu_flash, plain_attention])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_without_keys_a_result_merges_to_nothing(kernel: Kernel, dtype: torch.dtype) -> None:
    q, k, v = qkv(7, 13, dtype)
    none = torch.zeros(2, 13, dtype=torch.bool)
    none[1] = True
    out, lse = kernel(q, k, v, mask_BM=none)
    assert (lse[0] == -torch.inf).all()
    assert lse[1].isfinite().all()
    assert out.isfinite().all()
    other = kernel(q, k, v)
    merged_out, merged_lse = merge(out, lse, *other, masked=True)
    torch.testing.assert_close(merged_out[0], other[0][0].float())
    torch.testing.assert_close(merged_lse[0], other[1][0])
    nothing, nothing_lse = merge(out, lse, out, lse, masked=True)
    assert nothing.isfinite().all()
    assert (nothing_lse[0] == -torch.inf).all()


@pytest.mark.parametrize("kernel", [cudnn_flash, cuda_flash, cuda_efficient])
@pytest.mark.parametrize("mask", [None, MASK], ids=["all keys", "masked"])
def test_shapes_of_cuda_kernels(kernel: Kernel, mask: torch.Tensor | None) -> None:
    """PyTorch's own shape functions accept the arguments, without a GPU."""
    given = [x.to("meta") for x in qkv(7, 13, torch.bfloat16, heads=6, key_heads=2)]
    for prefix in (None, Prefix(*(places.to("meta") for places in PREFIX))):
        out, lse = kernel(*given, mask_BM=None if mask is None else mask.to("meta"), prefix=prefix)
        assert out.shape == (2, 7, 6, 16)
        assert lse.shape == (2, 6, 7)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kernel", [cudnn_flash, cuda_flash, cuda_efficient])
@pytest.mark.parametrize("key_heads", [8, 2, 1])
@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("length", "num_keys"), [(96, 96), (77, 133)])
def test_cuda_kernels(
    kernel: Kernel, key_heads: int, is_masked: bool, is_causal: bool, length: int, num_keys: int
) -> None:
    q, k, v = qkv(length, num_keys, torch.bfloat16, heads=8, key_heads=key_heads, dim=128)
    given = q.cuda(), k.cuda(), v.cuda()
    mask = None
    if is_masked:
        mask = torch.rand(2, num_keys, generator=torch.Generator().manual_seed(1)).cuda() > 0.5
        mask[:, 0] = True
    places = torch.arange(num_keys, device="cuda")
    prefix = Prefix(places[:length] + 1, places) if is_causal else None
    out, lse = kernel(*given, mask_BM=mask, prefix=prefix)
    expected_out, expected_lse = in_float64(*given, mask, prefix)
    torch.testing.assert_close(out.double(), expected_out, rtol=0, atol=2e-2)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=2e-2)
    if mask is not None:
        mask[0] = False
        out, lse = kernel(*given, mask_BM=mask)
        assert out.isfinite().all()
        assert (lse[0] == -torch.inf).all()
        assert lse[1].isfinite().all()


@pytest.mark.parametrize("kernel", [cudnn_flash, cuda_flash])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dim", [4, 12])
def test_head_dims_that_cuda_kernels_refuse(kernel: Kernel, device: str, dim: int) -> None:
    q, k, v = (x.to(device) for x in qkv(7, 13, torch.bfloat16, 6, 3, dim))
    mask = MASK.to(device)
    out, lse = kernel(q, k, v, mask_BM=mask)
    expected_out, expected_lse = in_float64(q, k, v, mask)
    torch.testing.assert_close(out.double(), expected_out, rtol=0, atol=2e-2)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=2e-2)


def test_chosen_once_per_device_and_dtype() -> None:
    assert local_kernel("cpu", torch.float32) is cpu_flash
    assert local_kernel("meta", torch.float32) is plain_attention


def test_partial_results_merge_exactly() -> None:
    q, k, v = qkv(7, 13)
    out, lse = merge(*cpu_flash(q, k[:, :4], v[:, :4]), *cpu_flash(q, k[:, 4:], v[:, 4:]))
    expected_out, expected_lse = cpu_flash(q, k, v)
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(lse, expected_lse)


def test_cropped_keys_are_not_seen() -> None:
    q, k, v = qkv(7, 13)
    rows = ((0, 4), (6, 11))
    kept = [*range(4), *range(6, 11)]
    k_bad, v_bad = k.clone(), v.clone()
    k_bad[:, 4:6], v_bad[:, 11:] = 1e4, 1e4
    out, _ = crop_keys(cpu_flash, rows)(q, k_bad, v_bad)
    torch.testing.assert_close(out, cpu_flash(q, k[:, kept], v[:, kept])[0])
    assert crop_keys(cpu_flash, None) is cpu_flash


def test_a_mask_is_cropped_with_its_keys() -> None:
    q, k, v = qkv(7, 13)
    rows = ((0, 4), (6, 11))
    kept = [*range(4), *range(6, 11)]
    out, _ = crop_keys(cpu_flash, rows)(q, k, v, mask_BM=MASK)
    torch.testing.assert_close(out, cpu_flash(q, k[:, kept], v[:, kept], mask_BM=MASK[:, kept])[0])
