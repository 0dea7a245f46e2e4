"""The cost model counts known work and prefers the strategy that must win on machines made to favour it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engines.core.layout import TokenLayout
from engines.core.spec import ParallelSpec
from engines.planner.cost_model import Workload, candidates, choose, predict
from engines.planner.forecast import forecast, workload
from engines.planner.machine import H200, Line, Machine, between
from engines.planner.profile import ModelProfile, profile
from engines.planner.step_cost import StepCost
from tests.engines.support import models

KINDS = ("all_to_all", "all_gather", "all_reduce", "rotation")
WORK = Workload(lengths=(("text", 512), ("image", 4096)), num_branches=2)


def machine(latency_s: float = 1e-5, bytes_per_s: float = 2e11, memory_bytes: int = 2**40, **slow: float) -> Machine:
    lines = {
        f"{kind}/{n}": Line(latency_s=latency_s * slow.get(kind, 1.0), bytes_per_s=bytes_per_s / slow.get(kind, 1.0))
        for kind in KINDS
        for n in (2, 3, 4, 8)
    }
    rates = ((512, 5e14), (4608, 7e14))
    return Machine(
        name="paper",
        products=rates,
        attention=rates,
        copy_bytes_per_s=4e12,
        memory_bytes=memory_bytes,
        exchanges=lines,
    )


@pytest.fixture(scope="module")
def flux() -> ModelProfile:
    """Return the profile of the published FLUX.1 transformer, without weights."""
    from diffusers import FluxTransformer2DModel

    from tests.support.flux_denoiser import as_denoiser

    with torch.device("meta"):
        return profile(as_denoiser(FluxTransformer2DModel(guidance_embeds=True).to(torch.bfloat16)))


def test_candidates_fit_heads_branches_and_width(flux: ModelProfile) -> None:
    found = candidates(flux, 4, num_branches=2)
    assert len(set(found)) == len(found)
    assert all(spec.num_ranks == 4 for spec in found)
    assert ParallelSpec(guidance=2, ulysses=2) in found
    assert ParallelSpec(ring=4) in found
    assert not any(spec.guidance > 1 for spec in candidates(flux, 4, num_branches=1))
    assert ParallelSpec(pipeline=2, tensor=2) in found
    assert ParallelSpec(ulysses=5) in candidates(flux, 5, num_branches=1)
    assert not any(spec.tensor == 5 for spec in candidates(flux, 5, num_branches=1))
    assert not any(spec.ulysses > 24 for spec in candidates(flux, 25, num_branches=1))


def test_heads_that_fill_up_cost_what_whole_ones_do(flux: ModelProfile) -> None:
    """30 heads on four ranks cost the same as 32; if every rank has all heads, they cost less."""
    uneven, even = (replace(flux, num_heads=heads, num_key_heads=heads) for heads in (30, 32))
    step = replace(WORK, num_branches=1)
    costs = [predict(counted, step, ParallelSpec(ulysses=4), machine()) for counted in (uneven, even)]
    assert costs[0].attention_ms == costs[1].attention_ms
    blocks_ms = [cost.exchange_ms - prediction_ms(flux, ParallelSpec(ulysses=4)) for cost in costs]
    assert blocks_ms[0] == pytest.approx(blocks_ms[1])
    gathered = [predict(counted, step, ParallelSpec(allgather_kv=4), machine()) for counted in (uneven, even)]
    assert gathered[0].attention_ms == pytest.approx(30 / 32 * gathered[1].attention_ms)


def prediction_ms(counted: ModelProfile, spec: ParallelSpec) -> float:
    layout = TokenLayout(lengths=WORK.lengths, num_chunks=spec.context)
    return 1e3 * StepCost(counted, layout, spec, machine()).prediction_s()


@pytest.mark.parametrize(("heads", "chosen"), [(24, "ulysses4"), (21, "ulysses4"), (5, "allgather_kv4")])
def test_auto_knows_what_uneven_heads_cost(flux: ModelProfile, heads: int, chosen: str) -> None:
    """On four ranks none of 24 heads are zeros, an eighth of 21, and three in eight of 5."""
    counted = replace(flux, num_heads=heads, num_key_heads=heads, head_dim=3072 // heads, tensor_unit=1)
    slow = machine(rotation=1e4, all_gather=3.0)
    assert forecast(counted, replace(WORK, num_branches=1), 4, slow).chosen.spec.name == chosen


def test_grouped_keys_cost_less_to_exchange(flux: ModelProfile) -> None:
    grouped, work = replace(flux, num_key_heads=6), replace(WORK, num_branches=1)
    for strategy in ("allgather_kv", "ulysses", "ring"):
        spec = ParallelSpec.of(strategy, 2)
        plain, fewer = (predict(counted, work, spec, machine(bytes_per_s=1e9)) for counted in (flux, grouped))
        assert fewer.exchange_ms < plain.exchange_ms
        assert fewer.attention_ms == plain.attention_ms


def test_work_is_shared_and_exchange_grows(flux: ModelProfile) -> None:
    one = predict(flux, WORK, ParallelSpec(), machine())
    four = predict(flux, WORK, ParallelSpec(ulysses=4), machine())
    assert one.exchange_ms == 0
    assert four.exchange_ms > 0
    assert four.products_ms < one.products_ms / 2
    assert four.memory_bytes < one.memory_bytes
    slow = predict(flux, WORK, ParallelSpec(ulysses=4), machine(bytes_per_s=1e9))
    assert slow.exchange_ms > 50 * four.exchange_ms
    assert slow.attention_ms == four.attention_ms


def test_two_branches_take_two_halves(flux: ModelProfile) -> None:
    whole = predict(flux, WORK, ParallelSpec(ulysses=2), machine())
    halves = predict(flux, WORK, ParallelSpec(guidance=2), machine())
    assert halves.exchange_ms < whole.exchange_ms / 10


def test_of_several_branches_the_largest_share_counts(flux: ModelProfile) -> None:
    """Three branches over two parts of the team take as long as four; over four parts, as one."""
    three, four, one = (replace(WORK, num_branches=number) for number in (3, 4, 1))
    halves, quarters = ParallelSpec(guidance=2, ulysses=2), ParallelSpec(guidance=4)
    assert predict(flux, three, halves, machine()) == predict(flux, four, halves, machine())
    assert predict(flux, three, quarters, machine()) == predict(flux, four, quarters, machine())
    assert predict(flux, four, quarters, machine()).products_ms == predict(flux, one, quarters, machine()).products_ms
    found = candidates(flux, 4, num_branches=4)
    assert {spec.guidance for spec in found} == {1, 2, 4}
    assert {spec.guidance for spec in candidates(flux, 6, num_branches=4)} == {1, 2, 3}


def test_a_small_step_of_two_branches_wants_few_exchanges() -> None:
    """The strategies have 1, 18 or 56 exchanges, each of a millisecond."""
    model = models.model("wan")
    plan = forecast(profile(model), workload(model, models.branches("wan", "even", num=2)), 2, machine(latency_s=1e-3))
    costs = {cost.spec.name: cost for cost in plan.costs if cost.spec.name in ("guidance2", "ulysses2", "tensor2")}
    assert list(costs) == ["guidance2", "ulysses2", "tensor2"], "fastest first"
    assert [round(cost.exchange_ms) for cost in costs.values()] == [1, 18, 56]
    assert plan.chosen.spec.name == "guidance2"


@pytest.mark.parametrize(
    ("slow", "kind"),
    [
        ({"all_gather": 100.0, "rotation": 1e4, "all_reduce": 1e4}, "ulysses"),
        ({"all_to_all": 1e4, "rotation": 1e4, "all_reduce": 1e4}, "allgather_kv"),
        ({"all_to_all": 1e4, "all_gather": 100.0, "all_reduce": 1e4, "rotation": 0.001}, "ring"),
    ],
)
def test_picks_what_the_machine_is_good_at(flux: ModelProfile, slow: dict[str, Any], kind: str) -> None:
    work = replace(WORK, num_branches=1)
    costs = [predict(flux, work, spec, machine(**slow)) for spec in candidates(flux, 4, 1)]
    assert choose(costs, 2**40).spec.degree(kind) == 4


@pytest.mark.parametrize(("num_ranks", "measured_ms"), [(1, 121.9), (2, 67.95), (4, 37.91)])
def test_the_known_machine_predicts_what_was_measured(flux: ModelProfile, num_ranks: int, measured_ms: float) -> None:
    """The figures are for 1024 x 1024 in bf16 by Ulysses: benchmarks/reports/denoise_step_h200_2026-11-21.md."""
    plan = forecast(flux, replace(WORK, num_branches=1), num_ranks, H200)
    assert plan.chosen.spec == ParallelSpec(ulysses=num_ranks)
    assert plan.chosen.total_ms == pytest.approx(measured_ms, rel=0.05)


def test_a_hand_ordered_step_hides_exchanges_only_where_it_runs(flux: ModelProfile) -> None:
    work, spec = replace(WORK, num_branches=1), ParallelSpec(ulysses=4)
    fast = predict(flux, work, spec, replace(machine(), fast_path=True))
    module = predict(flux, work, spec, machine())
    assert flux.has_fast_path
    assert fast.exchange_ms < module.exchange_ms
    assert fast.elementwise_ms < module.elementwise_ms / 2
    fast_int8 = predict(flux, work, spec, replace(H200, fast_path=True), "int8")
    assert fast_int8 == predict(flux, work, spec, replace(H200, fast_path=False), "int8"), "int8 runs the module"
    tensor = ParallelSpec(tensor=4)
    assert predict(flux, work, tensor, replace(machine(), fast_path=True)) == predict(flux, work, tensor, machine())


def test_nothing_fits(flux: ModelProfile) -> None:
    costs = [predict(flux, WORK, spec, machine()) for spec in candidates(flux, 2, 2)]
    with pytest.raises(ValueError, match=r"no way to divide the step fits 1.0 GiB: the smallest needs 1\d\.\d GiB"):
        choose(costs, 2**30)


def test_table_names_every_candidate_and_the_reason() -> None:
    """It is aligned, and fits a terminal of 80 columns with the longest name of a guided step on eight ranks."""
    plan = forecast(profile(models.model("flux")), replace(WORK, num_branches=1), 4, machine())
    table = plan.table()
    lines = table.splitlines()[:-1]
    assert {len(line) for line in lines} == {len(lines[0])}
    longest = max(len(cost.spec.name) for cost in plan.costs)
    assert len(lines[0]) - longest + len("guidance2xpipeline2xallgather_kv2") <= 80
    for cost in plan.costs:
        assert cost.spec.name in table
    assert table.count("*") == 2
    assert f"* {plan.chosen.spec.name}" in table
    assert "(on paper)" in table


def test_machine_reads_back_from_json() -> None:
    assert Machine.from_json(machine().to_json()) == machine()
    with pytest.raises(ValueError, match="not measured with rotation over 5 ranks"):
        machine().exchange_s("rotation", 5, 1.0)


def test_rates_between_measurements() -> None:
    table = ((100, 1.0), (300, 3.0))
    assert [between(table, size) for size in (10, 100, 200, 300, 900)] == [1.0, 1.0, 2.0, 3.0, 3.0]
    assert Line.through((0.0, 1.0), (10.0, 3.0)) == Line(latency_s=1.0, bytes_per_s=5.0)
    assert Line.through((0.0, 3.0), (10.0, 1.0)).time_s(5.0) == pytest.approx(3.0)
