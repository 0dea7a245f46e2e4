"""Each rank of a team gets its forwards, and missing teams are named in the error."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from engines.core.model import Branch
from engines.core.spec import ParallelSpec, tiling_sizes
from engines.parallel.division import Division, TeamSpecs, may_pair, shape_of
from engines.parallel.mesh import Groups
from tests.engines.support import models
from tests.engines.support.gloo import gang

EVERYONE = (0, 1, 2, 3)
GUIDED = TeamSpecs(
    by_size={
        1: (ParallelSpec(), ParallelSpec()),
        2: (ParallelSpec(ulysses=2), ParallelSpec(guidance=2)),
        4: (ParallelSpec(ulysses=4), ParallelSpec(guidance=2, ulysses=2)),
    }
)


def division(specs: TeamSpecs, *, rank: int = 0, num_ranks: int = 1) -> Division:
    return Division(specs, models.model("flux").plan, rank=rank, num_ranks=num_ranks, groups=Groups.of_gang())


def numbered() -> tuple[Branch, ...]:
    """Return branches of shapes 1 1 | 2 | 1 1 1: two pairs, and one over of each shape. Modules are named by number."""
    even, uneven = models.branches("flux", "even", num=2), models.branches("flux", "uneven", num=1)
    branches = (*even, *uneven, *even, even[0])
    return tuple(Branch(inputs=branch.inputs, module=str(number)) for number, branch in enumerate(branches))


def test_halves_of_a_team_take_a_branch_each_of_those_that_go_together() -> None:
    for rank, (four, own, checked) in enumerate(gang(4).run(forwards_of_rank)):
        half = rank // 2
        assert four == [(half, 2), (2, 4), (3 + half, 2), (5, 4)]
        assert own == [(number, 1) for number in range(6)], "nothing goes together on one rank"
        pair = (rank // 2 * 2, rank // 2 * 2 + 1)
        assert checked == [(pair, "guidance2"), ((0, 1, 2, 3), "guidance2xulysses2")]


def forwards_of_rank() -> tuple[list[tuple[int, int]], list[tuple[int, int]], list[tuple[tuple[int, ...], str]]]:
    """Return, for a team of four and then alone, each branch's number and the ranks its tokens are split over."""
    rank = dist.get_rank()
    subject = division(GUIDED, rank=rank, num_ranks=4)
    four, own = (
        [(int(branch.module), team.context.size) for branch, team in subject.forwards(numbered(), ranks)]
        for ranks in ((0, 1, 2, 3), (rank,))
    )
    return four, own, [(team.ranks, team.spec.name) for team in subject.checked_teams()]


def test_predictions_come_in_the_order_of_their_branches() -> None:
    for predicted in gang(4).run(predict_numbers):
        assert predicted == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def predict_numbers() -> list[float]:
    subject = division(GUIDED, rank=dist.get_rank(), num_ranks=4)
    predictions = subject.predict(numbered(), (0, 1, 2, 3), lambda branch, team: torch.tensor([float(branch.module)]))
    return [float(prediction) for prediction in predictions]


FOUR = TeamSpecs(by_size={4: ParallelSpec(guidance=4).by_branches()})


def test_up_to_four_branches_run_at_once() -> None:
    """Adjacent branches of one shape are divided: two by halves, four by quarters, three as two and one."""
    for rank, made in enumerate(gang(4).run(forwards_of_several)):
        half = rank // 2
        assert made == {
            1: [(0, 4)],
            2: [(half, 2)],
            3: [(half, 2), (2, 4)],
            4: [(rank, 1)],
            5: [(rank, 1), (4, 4)],
            6: [(rank, 1), (4 + half, 2)],
        }


def forwards_of_several() -> dict[int, list[tuple[int, int]]]:
    subject = division(FOUR, rank=dist.get_rank(), num_ranks=4)
    (one,) = models.branches("flux", "even")
    several = tuple(Branch(inputs=one.inputs, module=str(number)) for number in range(6))
    return {
        num: [(int(branch.module), team.context.size) for branch, team in subject.forwards(several[:num], EVERYONE)]
        for num in range(1, 7)
    }


def test_only_what_the_plan_calls_free_may_differ() -> None:
    (one,) = models.branches("flux", "even")
    plan = replace(models.model("flux").plan, free=("isolate", "hint"))
    off, on = (replace(one, constants={"isolate": isolate, "height": 2}) for isolate in (False, True))
    assert may_pair(off, on, plan)
    assert may_pair(replace(one, constants={"height": 2}), on, plan)
    assert not may_pair(off, replace(off, constants={"isolate": False, "height": 3}), plan)
    assert not may_pair(off, on, models.model("flux").plan)
    short, long = (replace(one, inputs={**one.inputs, "hint": torch.zeros(length)}) for length in (1, 2))
    assert may_pair(short, long, plan)
    assert not may_pair(short, long, models.model("flux").plan)


def test_sizes_of_small_teams_that_cannot_be_are_left_out_and_named() -> None:
    specs = TeamSpecs.of_sizes(tiling_sizes(6), lambda size: (ParallelSpec.of("guidance", size),))
    assert specs.sizes == (1, 2, 6)
    assert specs.of(6) == (ParallelSpec(guidance=2, ulysses=3),)
    with pytest.raises(ValueError, match="cannot divide a step over 3 ranks; allowed: 1, 2, 6"):
        specs.of(3)


def test_a_whole_gang_that_cannot_be_divided_is_an_error() -> None:
    with pytest.raises(ValueError, match="'guidance' needs a multiple of 2 ranks, not 3"):
        TeamSpecs.of_sizes(tiling_sizes(3), lambda size: (ParallelSpec.of("guidance", size),))


def test_branches_of_one_shape_have_one_key() -> None:
    (one,), (other,) = models.branches("flux", "even", seed=1), models.branches("flux", "even", seed=2)
    assert shape_of(one) == shape_of(other)
    longer, half = models.branches("flux", "uneven"), {name: x.half() for name, x in one.inputs.items()}
    others = (*longer, Branch(inputs=half), Branch(inputs=one.inputs, module="transformer_2"))
    assert shape_of(one) not in {shape_of(branch) for branch in others}
