"""Stages fit their hosts, and all that they name can be run."""

from __future__ import annotations

import pytest

from benchmarks.denoise_step import __main__ as step
from benchmarks.denoise_step.best import BEST, BEST_REST
from benchmarks.denoise_step.cases import CASES
from benchmarks.denoise_step.gpu import plan_of
from benchmarks.denoise_step.stage import MODEL_STEP, STEP, Run, Stage, joined
from benchmarks.denoise_step.stages import (
    OF_HOST,
    PEERS,
    PEERS_OF_A_PAIR,
    PEERS_OF_FOUR,
    PEERS_OF_ONE,
    STAGES,
    stages_named,
    stages_of_host,
)
from benchmarks.model_step.__main__ import CLIPS, MAKERS, MODELS, parse
from engines.core.spec import ParallelSpec

CHECKS_S = 30
"""Seconds before the first stage, in which peers are unpacked and checked."""
BY_NAME = {case.name: case for case in CASES}
BESIDE_EACH_OTHER = (*PEERS, *PEERS_OF_FOUR, *PEERS_OF_A_PAIR, *PEERS_OF_ONE)


def wanted(run: Run) -> tuple[str, ...]:
    assert run.arguments[0] == "--only"
    return run.arguments[1:]


@pytest.mark.parametrize("run", [run for stage in BESIDE_EACH_OTHER for run in stage.runs], ids=lambda run: run.name)
def test_gangs_that_take_turns_name_cases_for_as_many_ranks_as_they_have(run: Run) -> None:
    assert {BY_NAME[name].num_ranks for name in wanted(run)} == {len(run.gpus)}


@pytest.mark.parametrize("num_gpus", [1, 2, 3, 4, 8])
def test_a_host_has_gpus_for_the_stages_that_it_is_asked_for(num_gpus: int) -> None:
    assert {stage.min_gpus for stage in stages_of_host(num_gpus)} <= set(range(1, num_gpus + 1))
    assert set(stages_of_host(num_gpus)) <= set(STAGES)
    assert {gpu for stage in stages_of_host(num_gpus) for run in stage.runs for gpu in run.gpus} <= set(range(num_gpus))


def test_the_best_settings_fit_into_one_call_on_four_gpus() -> None:
    stages = stages_named(["best"])
    assert plan_of(stages).startswith(f"plan: {sum(stage.likely_s for stage in BEST)} s (best_quad 100, ")
    assert sum(stage.likely_s for stage in stages) <= 540 - CHECKS_S
    for stage in (*stages, *stages_named(["best_rest"])):
        assert 0 < stage.likely_s < stage.limit_s
        gpus = [gpu for run in stage.runs for gpu in run.gpus]
        assert sorted(set(gpus)) == sorted(gpus)  # at the same time
        assert not stage.takes_turns


@pytest.mark.parametrize("run", [run for stage in (*BEST, *BEST_REST) for run in stage.runs], ids=lambda run: run.name)
def test_what_may_hang_comes_after_what_it_is_a_variant_of(run: Run) -> None:
    if run.module == STEP:
        assert {BY_NAME[name].num_ranks for name in wanted(run)} == {len(run.gpus)}
        chosen = step.in_order(step.parse(list(run.arguments)), CASES)
        assert tuple(case.name for case in chosen) == wanted(run)
        for case in (case for case in chosen if case.is_peer and case.graph):
            assert wanted(run).index(f"{case.name}/uncaptured") < chosen.index(case)
    else:
        makers = parse(run.arguments).makers
        bases = [(maker, maker.removesuffix("-captured")) for maker in makers]
        assert all(makers.index(base) < makers.index(maker) for maker, base in bases if maker != base)


def test_a_host_is_asked_first_for_what_takes_all_its_gpus() -> None:
    assert {size: stages_of_host(size)[0].min_gpus for size in OF_HOST} == {1: 1, 2: 2, 4: 4}


def test_a_host_without_a_gpu_is_asked_for_nothing() -> None:
    with pytest.raises(ValueError, match="need a GPU"):
        stages_of_host(0)


@pytest.mark.parametrize("stage", [*PEERS_OF_FOUR, *PEERS_OF_A_PAIR, *PEERS_OF_ONE], ids=lambda stage: stage.name)
def test_peers_take_turns_with_ours_at_the_same_sizes_and_precisions(stage: Stage) -> None:
    asked = {run.name: {(BY_NAME[name].side, BY_NAME[name].precision) for name in wanted(run)} for run in stage.runs}
    (mine,) = (name for name in asked if "beside" in name)
    assert stage.takes_turns
    assert set.union(*asked.values()) == asked[mine]


def test_stages_together_take_turns_and_do_once_what_is_the_same() -> None:
    sglang, vllm_omni = PEERS_OF_FOUR[:2]
    both = joined([sglang, vllm_omni])
    assert both.takes_turns
    assert both.min_gpus == 4
    assert both.limit_s == sglang.limit_s + vllm_omni.limit_s
    assert [run.name for run in both.runs] == [
        "peer_quad_sglang_bf16",
        "peer_quad_vllm-omni_bf16",
        "quad_beside_sglang_bf16",
    ]


def test_no_run_overwrites_what_another_stage_has_written() -> None:
    names = [run.name for stage in STAGES for run in stage.runs]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("run", [run for stage in STAGES for run in stage.runs if run.module == STEP], ids=str)
def test_each_run_of_the_step_has_cases(run: Run) -> None:
    arguments = step.parse(list(run.arguments))
    assert any(arguments.wants(case) for case in CASES)
    assert set(arguments.only) <= BY_NAME.keys()


@pytest.mark.parametrize("run", [run for stage in STAGES for run in stage.runs if run.module == MODEL_STEP], ids=str)
def test_models_that_are_timed_are_known(run: Run) -> None:
    arguments = parse(run.arguments)
    assert not set(arguments.makers) - set(MAKERS)
    assert set(arguments.models) <= {*MODELS, *CLIPS, "FLUX.1-dev", "flux-3-image-klein"}
    for strategy in arguments.strategies if run.gpus else ():
        spec = ParallelSpec.of(strategy, len(run.gpus))
        assert spec.num_ranks == len(run.gpus)
        assert "guidance" not in strategy or spec.guidance == arguments.branches == 2
    assert "diffusers" not in arguments.makers or len(run.gpus) == 1 or len(arguments.makers) == 1
