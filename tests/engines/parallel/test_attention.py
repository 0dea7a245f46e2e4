import pytest
import torch

from engines.parallel.attention import cpu_flash, crop_keys, local_kernel, plain_attention
from engines.parallel.ring import merge


def qkv(length: int, num_keys: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = (length, num_keys, num_keys)
    return [torch.randn(2, n, 3, 16, generator=generator).to(dtype) for n in lengths]


def in_float64(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    scores = q @ k.mT / 4
    return (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1)


@pytest.mark.parametrize("kernel", [cpu_flash, plain_attention])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_out_and_lse(kernel, dtype: torch.dtype, bound: float) -> None:
    given = qkv(7, 13, dtype)
    out, lse = kernel(*given)
    expected_out, expected_lse = in_float64(*given)
    assert out.shape == given[0].shape
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected_out, rtol=0, atol=bound)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=bound)


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
