"""FlashAttention-3 replaces cuDNN only where it can. The package's function is a plain one here."""

from __future__ import annotations

import importlib.util
import logging
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from engines.core.attention import Prefix
from engines.core.tensors import relative_difference
from engines.parallel import flash3, local_attention
from engines.parallel.flash3 import with_flash3
from engines.parallel.local_attention import cudnn_flash, local_kernel, plain_attention
from tests.support.patience import PATIENCE_S

DIMS = (64, 128)


class Package:
    """Stands for fa3-fwd with heads of ``DIMS``. Answers are a multiple of the right one."""

    def __init__(self, times: float = 1.0, times_with_numbers: float = 1.0) -> None:
        self.times, self.times_with_numbers = times, times_with_numbers
        self.shapes: list[tuple[int, ...]] = []

    def flash_attn_func(self, q: Tensor, k: Tensor, v: Tensor, *, return_attn_probs: bool) -> tuple[Tensor, Tensor]:
        assert return_attn_probs
        return self._attended(self.times, q, k, v)

    def flash_attn_with_kvcache(
        self, q: Tensor, k: Tensor, v: Tensor, *, cache_seqlens: Tensor, num_splits: int, return_softmax_lse: bool
    ) -> tuple[Tensor, Tensor, None]:
        """Return any log-sum-exp for rows without keys, and ignore keys beyond the given number."""
        assert num_splits == return_softmax_lse == 1
        assert cache_seqlens.dtype == torch.int32
        first = torch.arange(k.shape[1]) < cache_seqlens[:, None]
        out, lse = self._attended(self.times_with_numbers, q, k, v, mask_BM=first)
        return out, lse.nan_to_num(neginf=7.0), None

    def _attended(self, times: float, *given: Tensor, **options: Tensor) -> tuple[Tensor, Tensor]:
        if given[0].shape[-1] not in DIMS:
            raise RuntimeError("This flash attention build does not support this head dim")
        self.shapes.append(tuple(given[0].shape))
        out, lse = plain_attention(*given, **options)  # type: ignore[arg-type]
        return times * out, lse


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Package:
    module: Any = ModuleType(flash3.MODULE)
    module.__spec__ = importlib.util.spec_from_loader(flash3.MODULE, None)
    package = Package(*getattr(request, "param", ()))
    module.flash_attn_func, module.flash_attn_with_kvcache = package.flash_attn_func, package.flash_attn_with_kvcache
    monkeypatch.setitem(sys.modules, flash3.MODULE, module)
    return package


def qkv(dim: int, heads: int = 4, key_heads: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = ((7, heads), (13, key_heads), (13, key_heads))
    return [torch.randn(2, *size, dim, generator=generator).bfloat16() for size in sizes]


def test_without_the_package_nothing_changes() -> None:
    assert with_flash3(plain_attention, plain_attention, "cpu") is plain_attention


@pytest.mark.parametrize("dim", DIMS)
def test_heads_that_it_has_are_its_own(package: Package, caplog: pytest.LogCaptureFixture, dim: int) -> None:
    with caplog.at_level(logging.INFO):
        kernel = with_flash3(plain_attention, plain_attention, "cpu")
    assert "attention uses FlashAttention-3 for head dims 64, 128" in caplog.text
    package.shapes.clear()
    given = qkv(dim)
    out, lse = kernel(*given)
    assert package.shapes == [(2, 7, 4, dim)]
    expected_out, expected_lse = plain_attention(*given)
    assert out.equal(expected_out)
    assert lse.equal(expected_lse)


def test_prefixes_and_other_heads_are_not(package: Package) -> None:
    kernel = with_flash3(plain_attention, plain_attention, "cpu")
    package.shapes.clear()
    given = qkv(128)
    mask, prefix = torch.arange(13).expand(2, 13) < 9, Prefix(torch.arange(7) + 1, torch.arange(13))
    seen: list[dict[str, Any]] = [{"prefix": prefix}, {"mask_BM": mask, "prefix": prefix}]
    for options in seen:
        assert kernel(*given, **options)[0].equal(plain_attention(*given, **options)[0])
    all_seen: list[dict[str, Any]] = [{}, {"mask_BM": mask}]
    for options in all_seen:
        assert kernel(*qkv(32), **options)[0].equal(plain_attention(*qkv(32), **options)[0])
    assert package.shapes == []


@pytest.fixture
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash3, "MIN_MASKED_KEYS", 13)


def test_masks_of_few_keys_are_not(package: Package) -> None:
    kernel = with_flash3(plain_attention, plain_attention, "cpu")
    package.shapes.clear()
    given, mask = qkv(128), torch.arange(13).expand(2, 13) < 9
    assert kernel(*given, mask_BM=mask)[0].equal(plain_attention(*given, mask_BM=mask)[0])
    assert package.shapes == []


@pytest.mark.usefixtures("few_are_many")
def test_keys_that_are_attended_come_first(package: Package) -> None:
    kernel = with_flash3(plain_attention, plain_attention, "cpu")
    package.shapes.clear()
    given, mask = qkv(128), torch.rand(2, 13, generator=torch.Generator().manual_seed(1)) > 0.5
    for value in (None, False, True):
        mask[0] = mask[0] if value is None else value
        out, lse = kernel(*given, mask_BM=mask)
        expected_out, expected_lse = plain_attention(*given, mask_BM=mask)
        torch.testing.assert_close(out, expected_out)
        torch.testing.assert_close(lse, expected_lse)
    assert len(package.shapes) == 3


@pytest.mark.usefixtures("few_are_many")
@pytest.mark.parametrize("package", [(1.0, 1.1)], indirect=True)
def test_masks_are_another_kernels_where_a_number_of_keys_gives_a_wrong_answer(
    package: Package, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        kernel = with_flash3(plain_attention, plain_attention, "cpu")
    assert "FlashAttention-3 is not used for heads of 128 with a mask: answer" in caplog.text
    package.shapes.clear()
    given, mask = qkv(128), torch.arange(13).expand(2, 13) < 9
    assert kernel(*given, mask_BM=mask)[0].equal(plain_attention(*given, mask_BM=mask)[0])
    assert package.shapes == []
    assert kernel(*given)[0].equal(plain_attention(*given)[0])
    assert len(package.shapes) == 1


def test_the_trial_calls_no_fallback(package: Package) -> None:
    """CuDNN would compile a kernel for each call of the trial."""
    fallback = Mock(side_effect=AssertionError("called"))
    assert with_flash3(fallback, plain_attention, "cpu") is not fallback
    assert {shape[-1] for shape in package.shapes} == set(DIMS)


@pytest.mark.parametrize("dim", flash3.HEAD_DIMS)
@pytest.mark.parametrize("is_masked", [False, True])
def test_rounded_probabilities_are_well_within_the_bound(dim: int, is_masked: bool) -> None:
    """FlashAttention-3 rounds probabilities and the answer to bfloat16; the exact answer is in float64."""
    inputs, mask_BM, _ = flash3.trial_call(dim, "cpu", is_masked)
    q_HLD, k_HMD, v_HMD = (x[0].transpose(0, 1).double() for x in inputs)
    scores_HLM = q_HLD @ k_HMD.mT / dim**0.5
    if mask_BM is not None:
        scores_HLM = scores_HLM.masked_fill(~mask_BM, -torch.inf)
    exact = scores_HLM.softmax(-1) @ v_HMD
    unscaled = (scores_HLM - scores_HLM.amax(-1, keepdim=True)).exp()
    rounded = (unscaled.bfloat16().double() @ v_HMD / unscaled.sum(-1, keepdim=True)).bfloat16()
    assert 1e-3 < relative_difference(rounded, exact) < 0.4 * flash3.MAX_ERROR
    plain_BLHD, lse_BHL = plain_attention(*(x.float() for x in inputs), mask_BM=mask_BM)
    assert relative_difference(plain_BLHD[0].transpose(0, 1), exact) < 1e-5
    assert relative_difference(lse_BHL[0], scores_HLM.logsumexp(-1)) < 1e-5


@pytest.mark.parametrize("package", [(1.1,), (1.015,)], indirect=True)
def test_a_wrong_answer_is_told_and_not_used(package: Package, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert with_flash3(plain_attention, plain_attention, "cpu") is plain_attention
    assert "FlashAttention-3 is not used for heads of 128: answer" in caplog.text


def test_a_library_for_another_pytorch_is_told(
    package: Package, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(name: str) -> ModuleType:
        raise ImportError("undefined symbol")

    monkeypatch.setattr(importlib, "import_module", refuse)
    with caplog.at_level(logging.WARNING):
        assert with_flash3(plain_attention, plain_attention, "cpu") is plain_attention
    assert "is not used: it is installed but cannot be loaded: undefined symbol" in caplog.text


@pytest.mark.parametrize(("capability", "is_taken"), [((9, 0), True), ((10, 0), False), ((8, 9), False)])
def test_other_gpus_than_hopper(
    package: Package, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], is_taken: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert (flash3.load_package(torch.device("cuda")) is not None) is is_taken


def test_the_sequence_of_random_numbers_goes_on(package: Package) -> None:
    before = torch.get_rng_state()
    with_flash3(plain_attention, plain_attention, "cpu")
    assert torch.get_rng_state().equal(before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.skipif(importlib.util.find_spec(flash3.MODULE) is None, reason="needs fa3-fwd")
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("key_heads", [8, 2])
@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize(("length", "num_keys"), [(4608, 4608), (77, 1333)])
def test_equal_to_cudnn_compiled_or_not(dim: int, key_heads: int, is_masked: bool, length: int, num_keys: int) -> None:
    kernel = local_kernel("cuda", torch.bfloat16)
    assert kernel.__name__ == "flash3"  # type: ignore[attr-defined]
    q_BLHD = torch.randn(2, length, 8, dim, device="cuda", dtype=torch.bfloat16)
    k_BMGD, v_BMGD = torch.randn(2, 2, num_keys, key_heads, dim, device="cuda", dtype=torch.bfloat16)
    mask_BM = torch.rand(2, num_keys, device="cuda") > 0.3 if is_masked else None
    expected_out, expected_lse = cudnn_flash(q_BLHD, k_BMGD, v_BMGD, mask_BM=mask_BM)
    torch._dynamo.reset()
    with torch.inference_mode():
        for run in (kernel, torch.compile(kernel, fullgraph=True)):
            out, lse = run(q_BLHD, k_BMGD, v_BMGD, mask_BM=mask_BM)
            torch.testing.assert_close(out, expected_out, rtol=0, atol=2e-2)
            torch.testing.assert_close(lse, expected_lse, rtol=0, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.skipif(importlib.util.find_spec(flash3.MODULE) is None, reason="needs fa3-fwd")
@pytest.mark.usefixtures("few_are_many")
def test_without_keys_a_result_merges_to_nothing() -> None:
    kernel, given = local_kernel("cuda", torch.bfloat16), [x.cuda() for x in qkv(128)]
    mask = torch.arange(13, device="cuda").expand(2, 13) < torch.tensor([[0], [9]], device="cuda")
    out, lse = kernel(*given, mask_BM=mask)
    assert out.isfinite().all()
    assert (lse[0] == -torch.inf).all()
    assert lse[1].isfinite().all()


def test_threads_get_the_same_kernel_which_is_chosen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's main thread needs it once weights are read, while another thread may still load its libraries."""
    is_chosen, calls = threading.Event(), []

    def cudnn_runs() -> bool:
        calls.append(threading.get_ident())
        is_chosen.wait(PATIENCE_S)
        return True

    monkeypatch.setattr(local_attention, "_cudnn_runs", cudnn_runs)
    monkeypatch.setattr(
        local_attention, "with_flash3", lambda fallback, _: lambda *call, **more: fallback(*call, **more)
    )
    caches = (local_attention._kernel_for, local_attention._half_precision_kernel)
    for cached in caches:
        cached.cache_clear()
    try:
        with ThreadPoolExecutor(2) as pool:
            chosen = [pool.submit(local_kernel, "cuda", torch.bfloat16) for _ in range(2)]
            time.sleep(0.2)  # the second thread waits by now, if it waits at all
            is_chosen.set()
            first, second = (one.result() for one in chosen)
    finally:
        for cached in caches:
            cached.cache_clear()
    assert first is second
    assert len(calls) == 1
