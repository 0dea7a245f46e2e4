import re
import subprocess
import sys

import pytest
import torch

from engines.core.spec import ParallelSpec, aligned_runs, tiling_sizes
from engines.parallel.tensor import split_features


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "expected"),
    [
        ("ulysses", 4, ParallelSpec(ulysses=4)),
        ("ring", 1, ParallelSpec()),
        ("hybrid", 2, ParallelSpec(ulysses=2)),
        ("hybrid", 4, ParallelSpec(ulysses=2, ring=2)),
        ("hybrid", 8, ParallelSpec(ulysses=4, ring=2)),
        ("ulysses4xring2", 8, ParallelSpec(ulysses=4, ring=2)),
        ("guidance", 2, ParallelSpec(guidance=2)),
        ("guidance", 4, ParallelSpec(guidance=2, ulysses=2)),
        ("guidance2xtensor", 8, ParallelSpec(guidance=2, tensor=4)),
        ("guidance3", 3, ParallelSpec(guidance=3)),
        ("guidance4xulysses", 8, ParallelSpec(guidance=4, ulysses=2)),
        ("guidance4", 2, ParallelSpec(guidance=2)),
        ("guidance2xulysses2", 2, ParallelSpec(ulysses=2)),
        ("ulysses2xtensor2", 2, ParallelSpec(tensor=2)),
    ],
)
def test_names(strategy: str, num_ranks: int, expected: ParallelSpec) -> None:
    assert ParallelSpec.of(strategy, num_ranks) == expected
    assert expected.num_ranks == num_ranks


def test_name_reads_back() -> None:
    spec = ParallelSpec(guidance=2, ulysses=4, ring=2)
    assert ParallelSpec.of(spec.name, 16) == spec


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "message"),
    [
        ("spiral", 4, "unknown strategy 'spiral'; known: ulysses, ring"),
        ("ulysses2xulysses2", 4, "unknown strategy"),
        ("guidance2xulysses", 3, "needs a multiple of 2 ranks, not 3"),
        ("guidancexulysses", 4, "give a number to all factors but one"),
        ("ulysses2xring2", 8, "cannot be spread over 8"),
        ("ring2xallgather_kv2", 4, "use one of them"),
        ("guidance3", 4, "cannot be spread over 4"),
        ("ulysses0", 4, "unknown strategy"),
    ],
)
def test_errors_say_what_is_allowed(strategy: str, num_ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelSpec.of(strategy, num_ranks)


def test_heads_that_do_not_divide() -> None:
    with pytest.raises(
        ValueError, match=r"tensor 5 does not fit: 24 heads, not divisible by 5; allowed: 1, 2, 3, 4, 6, 8, 12, 24"
    ):
        ParallelSpec(tensor=5).check(num_heads=24)
    with pytest.raises(
        ValueError, match="ulysses 25 does not fit: 24 heads, and every rank needs one; allowed: 1 to 24"
    ):
        ParallelSpec(ulysses=25).check(num_heads=24)
    with pytest.raises(
        ValueError, match=r"6 heads per tensor rank \(24 / 4\), and every rank needs one; allowed: 1 to 6"
    ):
        ParallelSpec(ulysses=8, tensor=4).check(num_heads=24)
    ParallelSpec(ulysses=5).check(num_heads=24)
    ParallelSpec(ulysses=4, tensor=4).check(num_heads=24)
    with pytest.raises(ValueError, match="names no linears"):
        ParallelSpec(tensor=2).check(num_heads=24, has_tensor_plan=False)
    ParallelSpec(ring=5).check(num_heads=24)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        (
            "small",
            "tensor 3 does not fit: 8960 features of blocks.*.ffn.net.0.proj, not divisible by 3; allowed: 1, 2, 4",
        ),
        (
            "large",
            "tensor 5 does not fit: 13824 features of blocks.*.ffn.net.0.proj, not divisible by 5; allowed: 1, 2, 4, 8",
        ),
    ],
)
def test_features_that_do_not_divide(family: str, message: str) -> None:
    """Wan 2.1: the 12 heads of 1.3B allow three ranks and the 40 heads of 14B five; their MLPs do not."""
    from diffusers import WanTransformer3DModel

    from pipelines.models.wan.spec import SPEC

    heads, features, layers = {"small": (12, 8960, 1), "large": (40, 13824, 1)}[family]
    with torch.device("meta"):
        module = WanTransformer3DModel(num_attention_heads=heads, ffn_dim=features, num_layers=layers)
    divided = split_features(module, SPEC.shard_plan({}))
    with pytest.raises(ValueError, match=re.escape(message)):
        ParallelSpec(tensor=int(message.split()[1])).check(num_heads=heads, features=divided)
    ParallelSpec(tensor=4).check(num_heads=heads, features=divided)


def test_one_branch_takes_the_guidance_axis() -> None:
    assert ParallelSpec(guidance=2, ring=2).for_branches(1) == ParallelSpec(ring=4)
    assert ParallelSpec(guidance=2).for_branches(1) == ParallelSpec(ulysses=2)
    assert ParallelSpec(ulysses=4).for_branches(1) == ParallelSpec(ulysses=4)
    assert ParallelSpec(guidance=3, tensor=2).for_branches(1) == ParallelSpec(tensor=6)
    assert ParallelSpec(guidance=3, tensor=2).for_branches(1, keep_weights=True) == ParallelSpec(tensor=2, ulysses=3)


def test_fewer_branches_take_what_they_do_not_need_of_the_guidance_axis() -> None:
    names = [spec.name for spec in ParallelSpec(guidance=4, ring=2).by_branches()]
    assert names == ["ring8", "guidance2xring4", "guidance2xring4", "guidance4xring2"]
    assert [spec.name for spec in ParallelSpec(guidance=3).by_branches()] == ["ulysses3", "ulysses3", "guidance3"]
    assert [spec.name for spec in ParallelSpec(guidance=2).by_branches()] == ["ulysses2", "guidance2"]
    assert [spec.name for spec in ParallelSpec(tensor=2).by_branches()] == ["tensor2", "tensor2"]


def test_aligned_runs_of_one_size_fill_the_gang() -> None:
    assert aligned_runs(4, 2) == [(0, 1), (2, 3)]
    assert tiling_sizes(6) == (1, 2, 3, 6)


def test_a_scheduler_needs_no_torch() -> None:
    code = "import sys, engines.gang.jobs.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
