"""What each stage asks of its host, and that what it names is there to be run."""

from __future__ import annotations

import pytest

from benchmarks.denoise_step.cases import CASES
from benchmarks.denoise_step.stages import PEERS, PEERS_OF_A_PAIR, SLOW_PEERS, STAGES, Run, Stage

BY_NAME = {case.name: case for case in CASES}
BESIDE_EACH_OTHER = (*PEERS, *SLOW_PEERS, *PEERS_OF_A_PAIR)


def wanted(run: Run) -> tuple[str, ...]:
    assert run.arguments[0] == "--only"
    return run.arguments[1:]


@pytest.mark.parametrize("run", [run for stage in BESIDE_EACH_OTHER for run in stage.runs], ids=lambda run: run.name)
def test_gangs_that_take_turns_name_cases_for_as_many_ranks_as_they_have(run: Run) -> None:
    assert {BY_NAME[name].num_ranks for name in wanted(run)} == {len(run.gpus)}


@pytest.mark.parametrize("stage", PEERS_OF_A_PAIR, ids=lambda stage: stage.name)
def test_a_host_of_two_gpus_is_enough_for_the_stages_of_a_pair(stage: Stage) -> None:
    assert stage.min_gpus <= 2
    assert {gpu for run in stage.runs for gpu in run.gpus} <= {0, 1}


@pytest.mark.parametrize("stage", PEERS_OF_A_PAIR, ids=lambda stage: stage.name)
def test_peers_of_a_pair_take_turns_with_ours_at_the_same_sizes(stage: Stage) -> None:
    sides = {run.name: {BY_NAME[name].side for name in wanted(run)} for run in stage.runs}
    (mine,) = (name for name in sides if "beside" in name)
    assert stage.takes_turns
    assert set.union(*sides.values()) == sides[mine]


def test_no_run_overwrites_what_another_stage_has_written() -> None:
    names = [run.name for stage in STAGES for run in stage.runs]
    assert len(set(names)) == len(names)
