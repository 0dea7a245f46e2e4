"""``memory_gib`` chooses savings by predicted costs, and changes the configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deployments.config import AppConfig
from deployments.http.answers import Model
from deployments.ingress import make_cards
from deployments.model_config import ModelConfig
from deployments.sizing import estimate
from deployments.sizing.estimate import Estimate, EstimateOptions, machine_like, make_estimate
from deployments.sizing.fit import APART, GIB, ON_CPU, SHARED, TURNS, Fit, OtherPass, RequestTimes, StageMemory
from deployments.sizing.memory_budget import applied, budget_of, predicted_s, rules_for, with_budgets
from deployments.sizing.savings import Budget, BudgetRules, Saving, choose_savings, extra_s_of
from engines.planner.cost_model import Workload
from engines.planner.forecast import forecast
from engines.planner.machine import MACHINES
from engines.planner.profile import ModelProfile, StreamCost
from pipelines.checkpoint import Checkpoint
from pipelines.models.ltx2.spec import REFINED
from pipelines.size import Size

ALL = BudgetRules()
LOSSLESS = BudgetRules(places=(SHARED, ON_CPU), offloads=False)
QUANTISING = replace(LOSSLESS, precisions=("native", "fp8", "int8"))
MACHINE = MACHINES["rtx-4090"]
TIMES = RequestTimes(num_steps=28, step_s=0.5, encode_s=0.1, decode_s=0.2, encode_flops=5e12)
PARTS = StageMemory(encoder=9 * GIB, decoder=GIB // 4, decode=4 * GIB, limited=2 * GIB, whole=4 * GIB)
COUNTED = ModelProfile(
    num_heads=24,
    num_key_heads=24,
    head_dim=128,
    num_attentions=40,
    dtype=torch.bfloat16,
    streams={"image": StreamCost(split_flops=12e9, whole_flops=1e9, reduced_features=80 * 3072)},
    once_flops=1e9,
    num_reductions=80,
    out_features=64,
    weight_bytes=12 * GIB,
    block_weight_bytes=11 * GIB,
    split_weight_bytes=10 * GIB,
    tensor_unit=24,
    num_blocks=40,
    num_repeated=40,
    largest_block_bytes=11 * GIB // 40,
)


def fit(memory_gib: float, num_ranks: int = 1) -> Fit:
    """Return a transformer of 12 GiB, an encoder of 9 and a decoder: 28.6 GiB on a GPU of this size."""
    machine = replace(MACHINE.for_ranks(num_ranks), memory_bytes=int(memory_gib * GIB))
    step = forecast(COUNTED, Workload(lengths=(("image", 4096),)), num_ranks, machine, must_fit=False)
    return Fit(step=step, num_ranks=num_ranks, parts=PARTS, unknown=())


def chosen(memory_gib: float, rules: BudgetRules = LOSSLESS, num_ranks: int = 1) -> Budget:
    return choose_savings(fit(memory_gib, num_ranks), TIMES, memory_gib, rules)


def keys(budget: Budget) -> list[str]:
    return [saving.key for saving in budget.savings]


def test_nothing_is_changed_where_all_fits() -> None:
    budget = chosen(48)
    assert (budget.savings, budget.extra_s, budget.is_lossy) == ((), 0.0, False)
    assert budget.num_bytes == fit(48).total_bytes
    assert "no savings needed" in budget.sentence()


@pytest.mark.parametrize("memory_gib", [29, 24, 20, 16, 12, 8])
def test_what_is_chosen_fits_and_less_memory_costs_more(memory_gib: float) -> None:
    budget = chosen(memory_gib, ALL)
    assert budget.savings
    assert budget.num_bytes <= 0.9 * memory_gib * GIB
    assert budget.extra_s >= chosen(memory_gib + 1, ALL).extra_s
    assert not budget.is_lossy


def test_blocks_are_offloaded_as_far_as_needed() -> None:
    """Two buffers stay on the GPU; copies cost time once they take longer than a forward."""
    rules = BudgetRules(places=(SHARED,))
    some, every = chosen(24, rules), chosen(20, rules)
    (few,), (many,) = ([one.value for one in budget.savings if "offloaded" in one.key] for budget in (some, every))
    assert 0 < few < many <= 40
    weights = fit(24).total_bytes - some.num_bytes
    limit = 2 * GIB if "decoder.memory_gib" in keys(some) else 0
    assert weights - limit == pytest.approx((few - 2) / 40 * 11 * GIB, rel=0.01)
    assert some.host_bytes == pytest.approx(few / 40 * 11 * GIB, rel=0.01)
    slow = replace(fit(20), step=replace(fit(20).step, machine=replace(fit(20).machine, host_bytes_per_s=1e9)))
    budget = choose_savings(slow, TIMES, 20, rules)
    (number,) = (one.value for one in budget.savings if "offloaded" in one.key)
    copies_s = 28 * number / 40 * 11 * GIB / 1e9
    assert 0.9 * copies_s < budget.extra_s < copies_s + 3, "for each of 28 steps, less what other work hides"


def test_an_encoder_takes_turns_where_both_do_not_fit() -> None:
    rules = BudgetRules(places=(SHARED, TURNS, ON_CPU), offloads=False)
    budget = chosen(24, rules)
    assert keys(budget) == ["text_encoder.takes_turns"]
    moved = PARTS.encoder + PARTS.decoder + COUNTED.weight_bytes
    assert budget.extra_s == pytest.approx(0.25 + moved / MACHINE.host_bytes_per_s)
    assert budget.num_bytes == fit(24).total_bytes - PARTS.encoder
    assert budget.host_bytes == moved
    assert not chosen(24, replace(rules, places=(TURNS,))).savings, "it is configured already"


LAYERS = replace(PARTS, layers=8 * GIB, buffers=GIB // 2, prompt=7 * GIB)
"""The encoder has layers of 8 GiB; pictures alone use one of them."""


def with_layers(memory_gib: float) -> Fit:
    return replace(fit(memory_gib), parts=LAYERS)


def test_layers_of_an_encoder_are_in_host_memory_where_that_costs_least() -> None:
    """A prompt copies the layers that encode it, less what its encoding hides."""
    budget = choose_savings(with_layers(24), TIMES, 24, ALL)
    assert keys(budget) == ["text_encoder.offloads_layers"]
    copies_s = 7 * GIB / MACHINE.host_bytes_per_s
    assert budget.extra_s == pytest.approx(copies_s - 0.1)
    assert budget.num_bytes == fit(24).total_bytes - 8 * GIB + GIB // 2
    assert budget.host_bytes == 8 * GIB
    guided = choose_savings(with_layers(24), replace(TIMES, num_prompts=2), 24, ALL)
    assert guided.extra_s == pytest.approx(2 * copies_s - 0.1)
    half = replace(ALL, layers=(False,))
    assert "text_encoder.offloads_layers" not in keys(choose_savings(with_layers(24), TIMES, 24, half))
    configured = replace(ALL, layers=(True,))
    assert not choose_savings(with_layers(24), TIMES, 24, configured).savings, "it is configured already"


def test_an_encoder_larger_than_the_card_takes_turns_with_layers_in_host_memory() -> None:
    """Its other weights sleep; no saving without both fits."""
    rules = BudgetRules(places=(SHARED, TURNS), offloads=False)
    large = replace(LAYERS, encoder=40 * GIB, layers=32 * GIB, prompt=32 * GIB)
    own = replace(fit(23), parts=large)
    budget = choose_savings(own, TIMES, 23, rules)
    assert keys(budget) == ["text_encoder.takes_turns", "text_encoder.offloads_layers"]
    asleep = 8 * GIB + GIB // 2 + PARTS.decoder + COUNTED.weight_bytes
    assert budget.host_bytes == 32 * GIB + asleep
    assert budget.extra_s == pytest.approx(0.25 + (asleep + 32 * GIB) / MACHINE.host_bytes_per_s - 0.1)
    with pytest.raises(ValueError, match="too many"):
        choose_savings(own, TIMES, 23, replace(rules, layers=(False,)))


def test_loaded_values_that_adapters_change_are_in_host_memory_before_blocks_are() -> None:
    """A copy for each change of adapters costs less than one of each block for each forward."""
    whole = fit(40)
    counted = replace(COUNTED, changed_weight_bytes=COUNTED.block_weight_bytes)
    changed = replace(whole, step=replace(whole.step, counted=counted))
    budget = choose_savings(changed, TIMES, 40, ALL)
    assert keys(budget) == ["denoiser.torch.originals_on_host"]
    assert budget.host_bytes == COUNTED.block_weight_bytes
    assert budget.num_bytes == whole.total_bytes
    assert budget.extra_s == pytest.approx(COUNTED.block_weight_bytes / MACHINE.host_bytes_per_s)
    fast = replace(changed, step=replace(changed.step, counted=replace(counted, has_fast_path=True)))
    assert "denoiser.torch.originals_on_host" not in keys(choose_savings(fast, TIMES, 40, ALL))


def test_layers_stay_where_they_save_nothing() -> None:
    """An encoder on CPU cores has no saving, nor one with two layers, which the buffers would replace."""
    on_cpu = choose_savings(with_layers(24), TIMES, 24, replace(ALL, places=(ON_CPU,)))
    assert "text_encoder.offloads_layers" not in keys(on_cpu)
    few = replace(fit(24), parts=replace(LAYERS, layers=GIB, buffers=GIB))
    assert "text_encoder.offloads_layers" not in keys(choose_savings(few, TIMES, 24, ALL))


def test_a_prepared_decoder_has_a_copy_of_its_weights() -> None:
    copied = replace(fit(48), parts=replace(PARTS, compiled=GIB // 4))
    assert copied.total_bytes - fit(48).total_bytes == GIB // 4
    assert copied.host_bytes - fit(48).host_bytes == GIB // 4
    on_gpu = {**ON_GPU, "decoder": {"num_gpus": 0.1, "compile": True}}
    plain, prepared = (
        budget_of(model(name="FLUX.1-dev", memory_gib=80, **{**document, "denoiser": ONE_RANK})).num_bytes
        for document in (ON_GPU, on_gpu)
    )
    assert prepared - plain == 2 * 49_545_475, "two bytes for each parameter of FLUX.1's decoder"


def test_decoder_before_encoder() -> None:
    """Strips cost seconds, an encoder on CPU cores a minute and more."""
    assert keys(chosen(31)) == ["decoder.memory_gib"]
    on_cpu = chosen(22)
    assert keys(on_cpu) == ["text_encoder.num_gpus"]
    assert on_cpu.extra_s == pytest.approx(5e12 / 5e10 - 0.1)


def test_an_encoder_of_unknown_size_stays() -> None:
    """Its saving and its cost elsewhere are unknown."""
    unknown = fit(16)
    unknown = replace(unknown, parts=replace(PARTS, encoder=0), unknown=("text_encoder",))
    budget = choose_savings(unknown, replace(TIMES, encode_flops=0.0), 16, ALL)
    assert not any(key.startswith("text_encoder") for key in keys(budget))
    assert "not counted: text_encoder" in budget.sentence()
    uncounted = choose_savings(fit(24), replace(TIMES, encode_flops=0.0), 24, LOSSLESS)
    assert uncounted.extra_s > 60, "work that is not counted is not free"


def test_lossless_savings_come_first_however_slow() -> None:
    rules = replace(QUANTISING, places=(SHARED, ON_CPU))
    slow = chosen(20, rules)
    assert not slow.is_lossy
    lossy = chosen(25, replace(rules, places=(SHARED,)))
    assert lossy.is_lossy
    assert keys(lossy)[-1] == "denoiser.precision"
    assert "other pixels" in lossy.sentence()


def test_nothing_lossy_without_permission() -> None:
    only_shared = BudgetRules(places=(SHARED,), offloads=False)
    with pytest.raises(ValueError, match="allow_quantization: true"):
        chosen(23, only_shared)
    assert chosen(25, replace(only_shared, precisions=("native", "fp8"))).is_lossy


def test_the_error_says_how_much_is_missing() -> None:
    with pytest.raises(ValueError, match=r"memory_gib is 6, of which 5\.4 are usable; with .*GiB, [\d.]+ too many"):
        choose_savings(fit(6), TIMES, 6, QUANTISING)


@pytest.mark.parametrize("memory_gib", [48, 24, 16, 12])
def test_the_costs_of_savings_are_known_for_other_requests(memory_gib: float) -> None:
    budget = chosen(memory_gib, ALL)
    own = fit(memory_gib)
    assert extra_s_of(own, TIMES, ALL, budget.savings) == pytest.approx(budget.extra_s)
    steps = sum(saving.extra_s for saving in budget.savings if saving.key.startswith("denoiser."))
    half = extra_s_of(own, replace(TIMES, num_steps=14), ALL, budget.savings)
    assert half == pytest.approx(budget.extra_s - steps / 2)


def test_a_limit_costs_nothing_where_a_decode_is_within_it() -> None:
    limit = Saving(key="decoder.memory_gib", value=2, extra_s=0.2)
    small = replace(fit(24), parts=replace(PARTS, decode=GIB, limited=GIB))
    assert extra_s_of(fit(24), TIMES, ALL, (limit,)) == pytest.approx(TIMES.decode_s)
    assert extra_s_of(small, TIMES, ALL, (limit,)) == 0.0


def test_savings_that_a_model_does_not_have_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"denoiser\.precision: fp8 are not among those of this model"):
        extra_s_of(fit(24), TIMES, LOSSLESS, (Saving(key="denoiser.precision", value="fp8", extra_s=0.0),))


def test_a_request_is_predicted_with_the_savings_of_its_model() -> None:
    one = ModelConfig.model_validate(
        {
            "name": "FLUX.1-dev",
            "memory_gib": 24,
            "dtype": "bfloat16",
            "text_encoder": {"num_gpus": 0.1},
            "decoder": {"num_gpus": 0.1},
            "denoiser": {"gpus_per_rank": 0.8},
        }
    )
    budget, size = budget_of(one), Size(width=1024, height=1024)
    assert "text_encoder.offloads_layers" in keys(budget)
    few, many = (predicted_s(one, budget, size, num_steps) for num_steps in (4, 28))
    roomy = one.model_copy(update={"memory_gib": 80.0})
    plain = predicted_s(roomy, budget_of(roomy), size, 28)
    assert 0 < few < many
    assert plain < many


def test_ranks_divide_the_weights_where_that_is_cheapest() -> None:
    """The saving names the division, since a start on a larger card would choose another one."""
    budget = chosen(25, replace(QUANTISING, places=(SHARED,)), num_ranks=2)
    assert "denoiser.strategy" in keys(budget)
    assert not budget.is_lossy
    named = chosen(25, BudgetRules(places=(SHARED,), strategy="tensor", offloads=False), num_ranks=2)
    assert "denoiser.strategy" not in keys(named)


def model(**changes: Any) -> ModelConfig:
    return ModelConfig.model_validate({"name": "flux-shapes", **changes})


ONE_RANK = {"num_ranks": 1, "gpus_per_rank": 0.8}
ON_ONE_GPU = {"denoiser": {"num_ranks": 1, "gpus_per_rank": 0.8}, "text_encoder": {"num_gpus": 0.1}}
ON_GPU = {"denoiser": {"gpus_per_rank": 0.8}, "text_encoder": {"num_gpus": 0.1}, "decoder": {"num_gpus": 0.1}}


def test_savings_are_keys_of_the_configuration() -> None:
    savings = (
        Saving(key="text_encoder.num_gpus", value=0, extra_s=1.0),
        Saving(key="text_encoder.offloads_layers", value=True, extra_s=0.0),
        Saving(key="decoder.memory_gib", value=2, extra_s=0.5),
        Saving(key="denoiser.precision", value="fp8", extra_s=-0.25, is_lossy=True),
    )
    further = Saving(key="denoiser.torch.offloaded_blocks", value=3, extra_s=0.0)
    budget = Budget(memory_gib=12, num_bytes=10 * GIB, host_bytes=0, savings=(*savings, further), figures="a GPU")
    changed = applied(budget, model(memory_gib=12, **ON_ONE_GPU))
    assert (changed.text_encoder.num_gpus, changed.decoder.memory_gib, changed.denoiser.precision) == (0, 2, "fp8")
    assert changed.text_encoder.offloads_layers
    assert (changed.denoiser.gpus_per_rank, changed.denoiser.num_offloaded) == (0.8, 3)
    assert (
        "text_encoder.num_gpus: 0, text_encoder.offloads_layers: true, decoder.memory_gib: 2, denoiser.precision"
        in budget.sentence()
    )
    assert "+1.2 s a request (predicted for a GPU), other pixels" in budget.sentence()


def test_the_configuration_says_what_may_change() -> None:
    quantised = ("fp8", "int8")
    assert rules_for(model(memory_gib=8, **ON_GPU), quantised).precisions == ("native",)
    allowed = model(memory_gib=8, allow_quantization=True, **ON_GPU)
    assert rules_for(allowed, quantised).precisions == ("native", "fp8", "int8")
    native = {**ON_GPU, "denoiser": {"gpus_per_rank": 0.8, "precision": "native"}}
    assert rules_for(model(memory_gib=8, allow_quantization=True, **native), quantised).precisions == ("native",)
    assert rules_for(model(memory_gib=8, **{**ON_GPU, "text_encoder": {}}), quantised).places == (ON_CPU,)
    assert rules_for(model(memory_gib=8), quantised).places == (SHARED,)
    assert rules_for(model(memory_gib=8, **{**ON_GPU, "text_encoder": {"num_gpus": 1}}), quantised).places == (APART,)
    turns = {**ON_GPU, "text_encoder": {"num_gpus": 0.1, "takes_turns": True}}
    assert rules_for(model(memory_gib=8, **turns), quantised).places == (TURNS,)
    two = {**ON_GPU, "decoder": {"num_gpus": 0.1, "num_replicas": 2}}
    assert TURNS not in rules_for(model(memory_gib=8, **two), quantised).places, "one replica each can sleep"
    offloading = {"gpus_per_rank": 0.8, "strategy": "ulysses", "torch": {"offloaded_blocks": 5}}
    assert rules_for(model(memory_gib=8, **{**ON_GPU, "denoiser": offloading}), quantised).num_offloaded == 5
    assert rules_for(model(memory_gib=8, **{**ON_GPU, "denoiser": offloading}), quantised).originals == (False, True)
    offloading = {"gpus_per_rank": 0.8, "torch": {"originals_on_host": True}}
    assert rules_for(model(memory_gib=8, **{**ON_GPU, "denoiser": offloading}), quantised).originals == (True,)
    assert rules_for(model(memory_gib=8, **ON_GPU), quantised).layers == (False, True)
    layers = {**ON_GPU, "text_encoder": {"num_gpus": 0.1, "offloads_layers": True}}
    assert rules_for(model(memory_gib=8, **layers), quantised).layers == (True,)
    assert rules_for(model(memory_gib=8, **{**ON_GPU, "text_encoder": {}}), quantised).layers == (False,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"allow_quantization": True}, "allow_quantization has no effect without memory_gib"),
        ({"memory_gib": 8, "share": "main"}, "shares.main.memory_gib"),
        ({"memory_gib": 8, "denoiser": {"engine": "tensorrt", "gpus_per_rank": 1}}, "memory_gib needs engine: torch"),
        ({"memory_gib": 0}, "greater than 0"),
        ({"text_encoder": {"takes_turns": True}, "share": "main"}, "takes_turns has no effect beside share: main"),
        ({"text_encoder": {"takes_turns": True}, "stages": "together"}, "takes_turns needs stages: apart"),
        ({"text_encoder": {"takes_turns": True, "num_replicas": 2}}, "text_encoder has one replica"),
    ],
)
def test_what_does_not_go_together(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model(**changes)


def test_a_model_that_fits_and_one_that_does_not() -> None:
    """The shipped model is small; three processes take 3 GiB."""
    args = AppConfig.model_validate({"models": [{"name": "flux-shapes", "memory_gib": 4}, {"name": "kontext-shapes"}]})
    fitted, budgets = with_budgets(args)
    assert fitted == args
    assert list(budgets) == ["flux-shapes"]
    memory = {name: budget.document() for name, budget in budgets.items()}
    cards = make_cards(fitted, memory)
    assert cards["flux-shapes"].memory == {**memory["flux-shapes"], "memory_gib": 4.0, "savings": []}
    assert Model.of(cards["flux-shapes"]).memory == memory["flux-shapes"]
    assert Model.of(cards["kontext-shapes"]).memory is None
    with pytest.raises(ValueError, match=r"the model flux-shapes: memory_gib is 1, .* [\d.]+ too many"):
        with_budgets(AppConfig.model_validate({"models": [{"name": "flux-shapes", "memory_gib": 1}]}))


def test_steps_that_are_not_known_before_a_request() -> None:
    with pytest.raises(ValueError, match=r"memory_gib is 8, but a step of .* is not known"):
        budget_of(model(name="xl", path="stable-diffusion-xl-base-1.0", memory_gib=8, denoiser={"num_ranks": 1}))


@pytest.mark.parametrize(
    ("memory_gib", "name"), [(24, "rtx-4090"), (12, "rtx-4090"), (48, "l40s"), (80, "h100"), (192, "h200")]
)
def test_costs_are_those_of_a_known_card_of_that_size(
    memory_gib: float, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate, "DRIVER_FOLDER", tmp_path)
    told = make_estimate(EstimateOptions(model="flux-shapes", num_ranks=1, memory_gib=memory_gib))
    assert isinstance(told, Estimate)
    assert (machine_like(memory_gib), told.origin.split(",")[0]) == (name, f"the known machine {name}")
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:01:00.0" / "information").write_text("Model: \t\t NVIDIA GeForce RTX 4090\nIRQ:   \t\t 70\n")
    assert machine_like(memory_gib) == "rtx-4090"


def test_recipes_with_a_second_pass_count_its_steps_and_the_upsampler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without sizes to prepare, the result has the size of a second pass over the model's default one."""
    opened, own = list[str](), Checkpoint.of_configuration

    def of_configuration(source: str, *args: Any) -> Checkpoint:
        opened.append(source)
        return own(source, *args)

    def num_bytes(*recipes: str, sizes: tuple[str, ...] = ()) -> int:
        each: dict[str, Any] = {"recipes": {name: {} for name in recipes}}
        denoiser = {**ONE_RANK, "warm_sizes": sizes}
        return budget_of(model(name="ltx", path="LTX-2", memory_gib=141, denoiser=denoiser, **each)).num_bytes

    monkeypatch.setattr(Checkpoint, "of_configuration", of_configuration)
    small = num_bytes()
    num_opened = len(opened)
    staged = num_bytes("two-stages")
    assert len(opened) == 2 * num_opened > 0, "no further checkpoint is opened"
    assert small < staged == num_bytes(sizes=("1536x1024",))
    assert num_bytes("two-stages", sizes=("736x480",)) < small, "no result of two passes has this size"


def test_both_passes_of_a_request_are_predicted() -> None:
    """A size that no result of two passes has is predicted for one."""
    path = {"path": "LTX-2", "memory_gib": 141, "denoiser": ONE_RANK}
    plain, two = model(name="ltx", **path), model(name="ltx", recipes={"two-stages": {}}, **path)
    large, single = Size(width=1536, height=1024), Size(width=736, height=480)
    options = EstimateOptions(model="LTX-2", num_ranks=1, machine="h200", memory_gib=141, num_steps=20)
    options = replace(options, size=str(large), second_stage_sigmas=REFINED.second_stage_sigmas)
    both = make_estimate(options)
    assert isinstance(both, Estimate)
    assert both.times.second_num_steps == 3
    budget = Budget(memory_gib=141, num_bytes=0, host_bytes=0, savings=())
    assert predicted_s(two, budget, large, 20) == pytest.approx(both.times.total_s)
    assert predicted_s(two, budget, single, 20) == predicted_s(plain, budget, single, 20)


def test_seconds_of_savings_count_the_steps_of_both_passes() -> None:
    """Larger steps hide more of the copies of offloaded blocks."""
    limits = BudgetRules(places=(SHARED,))
    own = fit(20)
    own = replace(own, step=replace(own.step, machine=replace(own.machine, host_bytes_per_s=1e9)))
    tiny = OtherPass(work=Workload(lengths=(("image", 64),)), num_steps=20)
    both = replace(TIMES, num_steps=20, second_num_steps=8)
    alike = choose_savings(replace(own, other_pass=replace(tiny, work=own.step.work)), both, 20, limits)
    assert alike.extra_s == pytest.approx(choose_savings(own, TIMES, 20, limits).extra_s)
    assert choose_savings(replace(own, other_pass=tiny), both, 20, limits).extra_s > alike.extra_s
