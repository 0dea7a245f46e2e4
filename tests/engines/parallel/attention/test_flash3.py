"""FlashAttention-3 in cuDNN's place: when it is called, and when not. The package's function is a plain one here."""

from __future__ import annotations

import importlib.util
import logging
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from engines.core.kernel import Prefix
from engines.parallel.attention import flash3
from engines.parallel.attention.flash3 import with_flash3
from engines.parallel.attention.local import cudnn_flash, local_kernel, plain_attention

DIMS = (64, 128)


class Package:
    """What fa3-fwd offers, with heads of ``DIMS``; ``times`` of the right answer."""

    def __init__(self, times: float = 1.0) -> None:
        self.times = times
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, return_attn_probs: bool) -> tuple[Tensor, Tensor]:
        assert return_attn_probs
        if q.shape[-1] not in DIMS:
            raise RuntimeError("This flash attention build does not support this head dim")
        self.shapes.append(tuple(q.shape))
        out, lse = plain_attention(q, k, v)
        return self.times * out, lse


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Package:
    module: Any = ModuleType(flash3.MODULE)
    module.__spec__ = importlib.util.spec_from_loader(flash3.MODULE, None)
    module.flash_attn_func = Package(*getattr(request, "param", ()))
    monkeypatch.setitem(sys.modules, flash3.MODULE, module)
    found: Package = module.flash_attn_func
    return found


def qkv(dim: int, heads: int = 4, key_heads: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = ((7, heads), (13, key_heads), (13, key_heads))
    return [torch.randn(2, *size, dim, generator=generator).bfloat16() for size in sizes]


def test_without_the_package_nothing_changes() -> None:
    assert with_flash3(plain_attention, "cpu") is plain_attention


@pytest.mark.parametrize("dim", DIMS)
def test_heads_that_it_has_are_its_own(package: Package, caplog: pytest.LogCaptureFixture, dim: int) -> None:
    with caplog.at_level(logging.INFO):
        kernel = with_flash3(plain_attention, "cpu")
    assert "attention is FlashAttention-3 for heads of 64, 128" in caplog.text
    package.shapes.clear()
    given = qkv(dim)
    out, lse = kernel(*given)
    assert package.shapes == [(2, 7, 4, dim)]
    expected_out, expected_lse = plain_attention(*given)
    assert out.equal(expected_out)
    assert lse.equal(expected_lse)


def test_masks_prefixes_and_other_heads_are_not(package: Package) -> None:
    kernel = with_flash3(plain_attention, "cpu")
    package.shapes.clear()
    given = qkv(128)
    mask, prefix = torch.arange(13).expand(2, 13) < 9, Prefix(torch.arange(7) + 1, torch.arange(13))
    for options in ({"mask_BM": mask}, {"prefix": prefix}, {"mask_BM": mask, "prefix": prefix}):
        assert kernel(*given, **options)[0].equal(plain_attention(*given, **options)[0])
    assert kernel(*qkv(32))[0].equal(plain_attention(*qkv(32))[0])
    assert package.shapes == []


@pytest.mark.parametrize("package", [(1.1,)], indirect=True)
def test_a_wrong_answer_is_told_and_not_used(package: Package, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert with_flash3(plain_attention, "cpu") is plain_attention
    assert "FlashAttention-3's answer for heads of 128 is wrong" in caplog.text


def test_a_library_for_another_pytorch_is_told(
    package: Package, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(name: str) -> ModuleType:
        raise ImportError("undefined symbol")

    monkeypatch.setattr(importlib, "import_module", refuse)
    with caplog.at_level(logging.WARNING):
        assert with_flash3(plain_attention, "cpu") is plain_attention
    assert "cannot be loaded, so it is not used: undefined symbol" in caplog.text


@pytest.mark.parametrize(("capability", "is_taken"), [((9, 0), True), ((10, 0), False), ((8, 9), False)])
def test_other_gpus_than_hopper(
    package: Package, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], is_taken: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert (flash3._installed(torch.device("cuda")) is package) is is_taken


def test_the_sequence_of_random_numbers_goes_on(package: Package) -> None:
    before = torch.get_rng_state()
    with_flash3(plain_attention, "cpu")
    assert torch.get_rng_state().equal(before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.skipif(importlib.util.find_spec(flash3.MODULE) is None, reason="needs fa3-fwd")
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("key_heads", [8, 2])
@pytest.mark.parametrize(("length", "num_keys"), [(4608, 4608), (77, 1333)])
def test_equal_to_cudnn_compiled_or_not(dim: int, key_heads: int, length: int, num_keys: int) -> None:
    kernel = local_kernel("cuda", torch.bfloat16)
    assert kernel.__name__ == "flash3"  # type: ignore[attr-defined]
    q_BLHD = torch.randn(1, length, 8, dim, device="cuda", dtype=torch.bfloat16)
    k_BMGD, v_BMGD = torch.randn(2, 1, num_keys, key_heads, dim, device="cuda", dtype=torch.bfloat16)
    expected_out, expected_lse = cudnn_flash(q_BLHD, k_BMGD, v_BMGD)
    with torch.inference_mode():
        for run in (kernel, torch.compile(kernel, fullgraph=True)):
            out, lse = run(q_BLHD, k_BMGD, v_BMGD)
            torch.testing.assert_close(out, expected_out, rtol=0, atol=2e-2)
            torch.testing.assert_close(lse, expected_lse, rtol=0, atol=2e-2)
