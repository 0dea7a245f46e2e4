"""Kernels of attention in turns: each is the one that is timed, and a wrong one is not timed at all."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.denoise_step import attention
from benchmarks.denoise_step.runners import Bench
from engines.parallel.local_attention import plain_attention

CPU = torch.device("cpu")


def attend(q_BLHD: Tensor, k_BMHD: Tensor, v_BMHD: Tensor) -> Tensor:
    return plain_attention(q_BLHD, k_BMHD, v_BMHD)[0]


def wrong(q_BLHD: Tensor, k_BMHD: Tensor, v_BMHD: Tensor) -> Tensor:
    return 100 * attend(q_BLHD, k_BMHD, v_BMHD)


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROUNDS", "CALLS", "REPEATS"):
        monkeypatch.setattr(attention, name, 1)
    monkeypatch.setattr(attention, "SIDES", (64,))


def choose(monkeypatch: pytest.MonkeyPatch, **choices: Any) -> None:
    monkeypatch.setattr(attention, "kernels", lambda *_: choices)


@pytest.mark.usefixtures("brief")
def test_each_kernel_is_timed_at_each_shape() -> None:
    found = [(each["tokens"], each["heads"], each["kernel"]) for each in attention.alone(CPU, torch.float32)]
    assert found == [(*shape, name) for shape in attention.SMALL_SHAPES for name in ("flash", "plain")]


@pytest.mark.usefixtures("brief")
def test_a_kernel_that_differs_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, right=attend, wrong=wrong)
    with pytest.raises(AssertionError, match="wrong is wrong"):
        list(attention.alone(CPU, torch.float32))


@pytest.mark.usefixtures("brief")
def test_a_step_runs_the_kernel_that_it_is_timed_with(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(rank=0, world=1, small=True)
    choose(monkeypatch, one=attend, other=attend)
    assert [each["kernel"] for each in attention.in_steps(bench)] == ["one", "other"]
    choose(monkeypatch, one=attend, other=wrong)
    with pytest.raises(AssertionError, match="wrong answer"):
        list(attention.in_steps(bench))


def test_a_gpu_that_warms_up_favours_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(attention, "REPEATS", 1)
    monkeypatch.setattr(attention, "ROUNDS", 3)
    attention.in_turns({name: lambda name=name: order.append(name) for name in "ab"})  # type: ignore[misc]
    assert order == list("aabb") * 3


@pytest.mark.parametrize("with_lse", [False, True])
def test_flash_attention_3_gives_its_answer_alone(monkeypatch: pytest.MonkeyPatch, with_lse: bool) -> None:
    interface: Any = ModuleType("fa3_fwd_interface")
    interface.flash_attn_func = lambda q, k, v: (q + k + v, None) if with_lse else q + k + v
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", interface)
    one = torch.ones(2)
    assert attention.flash_attention_3()(one, one, one).tolist() == [3, 3]


def test_flash_attention_3_is_left_out_where_it_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", None)
    monkeypatch.setattr(attention, "local_attention", lambda *_: attend)
    assert list(attention.kernels(torch.device("cuda"), torch.bfloat16)) == ["cuDNN", "FlashAttention-2"]
    assert "left out" in capsys.readouterr().out
