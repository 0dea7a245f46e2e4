"""What a step is timed under, and what its answer is compared with."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.denoise_step import __main__ as denoise_step
from benchmarks.denoise_step import elastic
from benchmarks.denoise_step.cases import CASES, Case
from benchmarks.denoise_step.runners import Bench
from benchmarks.models import flux
from benchmarks.peers import vllm_omni


def case_of(maker: str) -> Case:
    return next(case for case in CASES if case.maker == maker)


def test_prepared_steps_are_timed_as_they_were_prepared() -> None:
    """With gradients off: compiled code depends on it, and would be made again as the clock runs."""
    modes: list[bool] = []
    bench: Any = SimpleNamespace(small=True, fitting=lambda case: dataclasses.replace(case, repeats=2))
    denoise_step.run_case(bench, case_of("xdit"), lambda *_, **__: None, lambda: modes.append(torch.is_grad_enabled()))
    assert set(modes) == {False}


def test_vllm_omni_runs_in_the_mode_that_its_worker_runs_it_in(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[bool] = []

    def transformer(**_: Any) -> tuple[None]:
        modes.append(torch.is_inference_mode_enabled())
        return (None,)

    monkeypatch.setattr(vllm_omni, "_transformer", lambda *_: transformer)
    vllm_omni.vllm_omni_step(None, {}, compiled=True)()
    assert modes == [True]


def test_compiled_blocks_are_compared_with_the_module_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(rank=0, world=1, small=True)
    monkeypatch.setattr(
        bench.module, "compile_repeated_blocks", lambda **_: bench.module.proj_out.bias.add_(1.0), raising=False
    )
    with pytest.raises(AssertionError, match="wrong answer"):
        bench.run(case_of("blocks"))


@pytest.mark.parametrize(("maker", "team", "num_mine"), [("always8", (4, 5, 6, 7), 8), ("elastic8", (5,), 2)])
def test_eight_pictures_are_painted_by_as_many_ranks_as_the_case_says(
    monkeypatch: pytest.MonkeyPatch, maker: str, team: tuple[int, ...], num_mine: int
) -> None:
    """The sixth rank of eight belongs to the second of two teams of four."""
    given: list[Any] = []
    engine = SimpleNamespace(team_sizes=(1, 2, 4, 8), warm_up=lambda branches, ranks: given.append(ranks))
    monkeypatch.setattr(elastic, "new_job", lambda *_: SimpleNamespace(paint=lambda _: None))
    monkeypatch.setattr(flux, "inputs", lambda *_, **__: {})
    bench = Bench(rank=5, world=8, small=True)
    monkeypatch.setattr(Bench, "module", None)
    bench.engine, bench.inputs = lambda _: engine, lambda *_: {}  # type: ignore[assignment]
    step, _ = bench.prepare(bench.fitting(case_of(maker)))
    assert given == [team]
    assert len(step()) == num_mine


@pytest.mark.parametrize("maker", ["fast", "engine"])
def test_ours_is_timed_and_right_on_a_small_model(maker: str) -> None:
    case = next(case for case in CASES if case.maker == maker and case.num_ranks == 1 and case.precision == "native")
    result = denoise_step.run_case(Bench(rank=0, world=1, small=True), case, lambda *_, **__: None)
    assert "error" not in result
    assert result["median_ms"] > 0
