"""Sums of weights and low-rank products are rounded once, and shares of a weight get theirs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from engines import additions
from engines.additions import SwitchTimes, WeightSwitch, add_products, merge, slice_low_rank, touch_copies
from engines.core.engine import EngineChoice
from engines.core.host_copy import TouchedMemory
from engines.core.model import Addition, LowRank, Mix, normal_mix
from engines.core.resources import rank_resources
from engines.core.spec import Scheme
from engines.fast.gemm import Float8Gemm, WeightPart
from engines.parallel.weight_files import Slice
from engines.quantization.linear import LAYERS
from engines.registry import check_engine
from tests.engines.support import models

ROWS, COLUMNS = 12, 10


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def low_rank(rank: int, seed: int, scale: float = 1.5) -> LowRank:
    return LowRank(up_NR=random(ROWS, rank, seed=seed), down_RK=random(rank, COLUMNS, seed=seed + 1), scale=scale)


def linear(dtype: torch.dtype = torch.float32) -> nn.Linear:
    layer = nn.Linear(COLUMNS, ROWS, dtype=dtype).requires_grad_(False)
    layer.weight.copy_(random(ROWS, COLUMNS, seed=0))
    return layer


ONE, TWO = low_rank(2, seed=1), low_rank(3, seed=5)
ADDITIONS: dict[str, Addition] = {"one": {"m": {"weight": ONE}}, "two": {"m": {"weight": TWO}}}


def exact(base: Tensor, *amounts: tuple[float, LowRank]) -> Tensor:
    products = (amount * one.scale * one.up_NR.double() @ one.down_RK.double() for amount, one in amounts)
    return base.double() + sum(products)


def test_two_products_are_rounded_once() -> None:
    layer = linear(torch.bfloat16)
    base = layer.weight.clone()
    merge(layer, [(0.8, {"weight": ONE}), (-0.5, {"weight": TWO}), (0.0, {"bias": ONE})], {})
    assert layer.weight.equal(exact(base, (0.8, ONE), (-0.5, TWO)).to(torch.bfloat16))
    assert layer.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(("shape", "columns"), [((ROWS, 5, 1, 2), 10), ((ROWS,), 1)], ids=["convolution", "bias"])
def test_parameters_of_other_shapes(shape: tuple[int, ...], columns: int) -> None:
    one = LowRank(up_NR=random(ROWS, 2, seed=1), down_RK=random(2, columns, seed=2))
    total = add_products(torch.ones(shape), [(2.0, one)])
    assert torch.allclose(total.flatten(), (1 + 2 * one.up_NR @ one.down_RK).flatten(), atol=1e-5)
    assert total.shape == shape


@pytest.mark.parametrize(("dim", "ranges"), [(0, ((3, 6),)), (1, ((0, 2), (5, 9)))], ids=["rows", "columns"])
def test_a_share_gets_its_part(dim: int, ranges: tuple[tuple[int, int], ...]) -> None:
    place = Slice(name="weight", dim=dim, ranges=ranges)
    mine = slice_low_rank(ONE, {"share.weight": place}, "share.weight")
    whole = add_products(torch.zeros(ROWS, COLUMNS), [(1.0, ONE)])
    pieces = [whole.narrow(dim, start, stop - start) for start, stop in ranges]
    assert torch.allclose(add_products(torch.zeros_like(torch.cat(pieces, dim)), [(1.0, mine)]), torch.cat(pieces, dim))


def switch_of(layer: nn.Module, *, on_host: bool = False) -> WeightSwitch:
    switch = WeightSwitch(ADDITIONS, on_host=on_host)
    switch.hold("m", "whole", layer, {}, loaded=dict(layer.named_parameters()))
    return switch


@pytest.mark.parametrize("on_host", [False, True])
def test_weights_change_in_place_and_come_back_bit_for_bit(on_host: bool) -> None:
    layer = linear(torch.bfloat16)
    base, address = layer.weight.clone(), layer.weight.data_ptr()
    switch = switch_of(layer, on_host=on_host)
    for mix in ((("one", 1.0),), (("two", -3.0), ("one", 0.5)), (("one", 0.0),), ()):
        switch.set("m", "whole", mix)
        kinds = {"one": ONE, "two": TWO}
        assert layer.weight.equal(exact(base, *((amount, kinds[name]) for name, amount in mix)).to(torch.bfloat16))
    assert layer.weight.equal(base)
    assert layer.weight.data_ptr() == address


def test_what_is_there_already_is_not_written_again() -> None:
    layer = linear()
    switch = switch_of(layer)
    version = layer.weight._version
    switch.set("m", "whole", (("one", 0.0),))
    assert layer.weight._version == version
    switch.set("m", "whole", (("one", 1.0), ("two", 1.0)))
    version = layer.weight._version
    switch.set("m", "whole", (("two", 1.0), ("one", 1.0), ("one", 0.0)))
    assert layer.weight._version == version


def test_a_weight_that_moves_is_followed() -> None:
    """Stacked layers become views of the stack after the switch has taken hold of them."""
    layer = linear()
    switch = switch_of(layer)
    base = layer.weight.clone()
    stacked = torch.cat((layer.weight, torch.zeros(1, COLUMNS)))
    layer.weight.data = stacked[:ROWS]
    switch.set("m", "whole", (("one", 1.0),))
    assert torch.allclose(stacked[:ROWS], exact(base, (1.0, ONE)).float(), atol=1e-5)


def test_what_was_written_halfway_is_undone_in_all_shares() -> None:
    layer = linear()
    switch = switch_of(layer)
    loaded, base = dict(layer.named_parameters()), layer.weight.clone()

    def fail(value: torch.Tensor) -> None:
        layer.weight.copy_(value)
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    switch.hold("m", "other", layer, {}, loaded=loaded, writers={cast("nn.Parameter", layer.weight): (fail,)})
    with pytest.raises(torch.OutOfMemoryError):
        switch.set("m", "other", (("one", 1.0),))
    assert not layer.weight.equal(base)
    switch.set("m", "whole", ())
    assert layer.weight.equal(base)


def test_a_name_that_is_not_known_lists_those_that_are() -> None:
    with pytest.raises(ValueError, match="unknown additions to the weights: three; known: one, two"):
        switch_of(linear()).set("m", "whole", (("three", 1.0),))


def test_equal_mixes_compare_equal() -> None:
    assert normal_mix((("b", 1.0), ("c", 0.0), ("a", 2.0))) == normal_mix((("a", 2.0), ("b", 1.0)))


MIXES: tuple[Mix, ...] = ((("one", 1.0),), (("two", -3.0), ("one", 0.5)), ())


@pytest.mark.parametrize("kind", LAYERS)
def test_a_quantised_layer_is_as_if_it_had_been_loaded_so(kind: Scheme) -> None:
    holder = nn.Sequential(linear(torch.bfloat16))
    loaded = dict(holder.named_parameters())
    holder[0] = layer = LAYERS[kind](linear(torch.bfloat16))
    before, address = (layer.weight_NK.clone(), layer.scale_1N.clone()), layer.weight_NK.data_ptr()
    additions: dict[str, Addition] = {name: {"m": {"0.weight": one["m"]["weight"]}} for name, one in ADDITIONS.items()}
    switch = WeightSwitch(additions)
    switch.hold("m", "whole", holder, {}, loaded=loaded)
    kinds = {"one": ONE, "two": TWO}
    for mix in MIXES:
        switch.set("m", "whole", mix)
        merged = linear(torch.bfloat16)
        merge(merged, [(amount, {"weight": kinds[name]}) for name, amount in mix], {})
        expected = LAYERS[kind](merged)
        assert layer.weight_NK.float().equal(expected.weight_NK.float())
        assert layer.scale_1N.equal(expected.scale_1N)
    assert loaded["0.weight"].equal(linear(torch.bfloat16).weight), "loaded values stay"
    assert layer.weight_NK.float().equal(before[0].float())
    assert layer.scale_1N.equal(before[1])
    assert layer.weight_NK.data_ptr() == address


PARTS: dict[str, Callable[[nn.Parameter], tuple[WeightPart, ...]]] = {
    "stacked": lambda weight: (WeightPart(parameter=other(1)), WeightPart(parameter=weight)),
    "rows": lambda weight: (WeightPart(parameter=weight, rows=slice(3, 9)),),
    "columns": lambda weight: (
        WeightPart(parameter=weight, columns=slice(4)),
        WeightPart(parameter=other(2), columns=slice(4)),
    ),
}


def other(seed: int) -> nn.Parameter:
    return nn.Parameter(random(ROWS, COLUMNS, seed=seed).bfloat16(), requires_grad=False)


@pytest.mark.parametrize("name", PARTS)
def test_a_float8_gemm_takes_new_values_of_its_parts(name: str) -> None:
    weight = other(0)
    parts = PARTS[name](weight)

    def stack() -> Tensor:
        return torch.cat([part.of(part.parameter) for part in parts])

    gemm = Float8Gemm(parts, None)
    address = gemm.weight_NK.data_ptr()
    (write,) = (write for parameter, write in gemm.writers() if parameter is weight)
    new = other(7)
    write(new.data)
    weight.data.copy_(new)
    expected = Float8Gemm([WeightPart(parameter=nn.Parameter(stack(), requires_grad=False))], None)
    assert gemm.weight_NK.float().equal(expected.weight_NK.float())
    assert gemm.scale_1N.equal(expected.scale_1N)
    assert gemm.weight_NK.data_ptr() == address


@pytest.mark.parametrize("precision", ["fp8", "int8", "native"])
def test_every_precision_takes_what_is_merged_and_what_is_switched(precision: str) -> None:
    check_engine("torch", EngineChoice(precision=precision, merges=True, switches=True))


Table = dict[str, Addition]
"""Additions that are loaded and removed."""


def test_additions_come_and_go_in_all_shares() -> None:
    """The shares are views of one memory, so each must be able to undo what another applied."""
    layer, table = linear(), Table(one=ADDITIONS["one"])
    switch, base = WeightSwitch(table, grows=True), layer.weight.clone()
    for share in ("whole", "view"):
        switch.hold("m", share, layer, {}, loaded=dict(layer.named_parameters()))
    assert not switch.is_behind((("one", 1.0),))
    switch.set("m", "whole", (("one", 1.0),))
    table["two"] = ADDITIONS["two"]
    assert not switch.is_behind((("one", 1.0),)), "nothing asks for it yet"
    mix = (("one", 1.0), ("two", 0.5))
    with pytest.raises(ValueError, match="unknown additions to the weights: two; known: one"):
        switch.set("m", "whole", mix)
    assert switch.is_behind(mix)
    switch.catch_up(mix)
    switch.set("m", "whole", mix)
    assert torch.allclose(layer.weight, exact(base, (1.0, ONE), (0.5, TWO)).float(), atol=1e-5)
    del table["two"]
    assert not switch.is_behind(mix), "a job has it still"
    assert switch.is_behind(())
    switch.catch_up(())
    assert layer.weight.equal(base)
    switch.set("m", "view", ())
    assert layer.weight.equal(base)
    switch.hold("m", "later", layer, {}, loaded=dict(layer.named_parameters()))
    switch.set("m", "later", (("one", 1.0),))
    assert torch.allclose(layer.weight, exact(base, (1.0, ONE)).float(), atol=1e-5)
    table.clear()
    switch.hold("m", "last", layer, {}, loaded=dict(layer.named_parameters()))
    assert layer.weight.equal(base), "a share that is held later knows the same additions as the others"


def test_weights_are_written_only_for_additions_that_they_have() -> None:
    """Otherwise another request's new or removed adapter would make a step take longer than its scheduler knows."""
    layer, table = linear(), Table()
    switch, base = WeightSwitch(table, grows=True), layer.weight.clone()
    switch.hold("m", "whole", layer, {}, loaded=dict(layer.named_parameters()))
    table.update(dict.fromkeys(("mine", "gone"), ADDITIONS["one"]))
    mine, both = (("mine", 1.0),), (("mine", 1.0), ("gone", 0.5))
    switch.catch_up(both)
    switch.set("m", "whole", mine)
    before, version = layer.weight.clone(), layer.weight._version
    table["new"] = ADDITIONS["two"]
    switch.catch_up((("mine", 1.0), ("new", 1.0)))
    del table["gone"]
    assert switch.is_behind(mine)
    switch.reset_before(mine)
    switch.catch_up(mine)
    switch.set("m", "whole", mine)
    assert not switch.is_behind(mine)
    assert (layer.weight.equal(before), layer.weight._version) == (True, version)
    switch.set("m", "whole", (("new", 1.0),))
    assert torch.allclose(layer.weight, exact(base, (1.0, TWO)).float(), atol=1e-5)
    del table["new"]
    switch.reset_before(())
    assert layer.weight.equal(base)
    switch.catch_up(())
    assert layer.weight.equal(base), "it was in the weights"
    switch.set("m", "whole", mine)
    assert layer.weight.equal(before)


def test_an_addition_for_which_there_is_no_memory_is_in_no_share(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, table = linear(), Table()
    switch, base, num = WeightSwitch(table, grows=True), layer.weight.clone(), 0

    def full(low_rank: LowRank, device: torch.device) -> LowRank:
        nonlocal num
        num += 1
        if num == 2:
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")
        return low_rank

    for share in ("whole", "view"):
        switch.hold("m", share, layer, {}, loaded=dict(layer.named_parameters()))
    table["one"], mix = ADDITIONS["one"], (("one", 1.0),)
    monkeypatch.setattr(additions, "prepared", full)
    with pytest.raises(torch.OutOfMemoryError):
        switch.catch_up(mix)
    assert switch.is_behind(mix)
    switch.catch_up(mix)
    switch.set("m", "view", mix)
    assert torch.allclose(layer.weight, exact(base, (1.0, ONE)).float(), atol=1e-5)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_quantised_layer_takes_an_addition_that_comes_later(kind: Scheme) -> None:
    holder, table = nn.Sequential(linear(torch.bfloat16)), Table()
    loaded = dict(holder.named_parameters())
    holder[0] = layer = LAYERS[kind](linear(torch.bfloat16))
    switch = WeightSwitch(table, grows=True)
    switch.hold("m", "whole", holder, {}, loaded=loaded)
    table["one"], mix = {"m": {"0.weight": ONE}}, (("one", 1.0),)
    switch.catch_up(mix)
    switch.set("m", "whole", mix)
    merged = linear(torch.bfloat16)
    merge(merged, [(1.0, {"weight": ONE})], {})
    assert layer.weight_NK.float().equal(LAYERS[kind](merged).weight_NK.float())


def test_changes_of_weights_are_timed_and_steps_without_one_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(0, 1000, 3))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(seconds)))
    times, layer = rank_resources().get(SwitchTimes), linear()
    times.forget()
    switch = WeightSwitch(ADDITIONS)
    switch.hold("m", "whole", layer, {}, loaded=dict(layer.named_parameters()))
    taken_ms = []
    for mix in ((), (("one", 1.0),), (("one", 1.0),), (("two", 1.0),), ()):
        switch.set("m", "whole", mix)
        taken_ms.append(times.take_ms())
    assert taken_ms == [0, 3000, 0, 3000, 3000]


def test_a_module_that_no_addition_changes_has_no_changes_to_time() -> None:
    """One of two transformers may be such a module: changes of no duration would lower the median."""
    times, layer = rank_resources().get(SwitchTimes), linear()
    times.forget()
    switch = WeightSwitch(ADDITIONS)
    switch.hold("other", "whole", layer, {}, loaded=dict(layer.named_parameters()))
    for mix in ((("one", 1.0),), ()):
        switch.set("other", "whole", mix)
    assert times.take_ms() == 0


def test_copies_on_the_host_lie_in_memory_that_was_touched_before() -> None:
    memory, layer = rank_resources().get(TouchedMemory), linear()
    memory.clear()
    model = replace(models.model("flux"), modules={"m": layer, "other": linear()}, additions=ADDITIONS)
    touch_copies(replace(model, additions_change=True))
    assert memory.num_bytes == layer.weight.nbytes, "no memory for weights that only later additions may change"
    switch = switch_of(layer, on_host=True)
    assert memory.num_bytes == 0
    base = layer.weight.clone()
    for mix in ((("one", 1.0),), ()):
        switch.set("m", "whole", mix)
    assert layer.weight.equal(base)


@pytest.mark.gpu
def test_loaded_values_in_host_memory_take_none_of_the_gpus() -> None:
    layer = nn.Linear(1024, 1024, dtype=torch.bfloat16, device="cuda").requires_grad_(False)
    products = {"weight": LowRank(up_NR=random(1024, 4, seed=1), down_RK=random(4, 1024, seed=2))}
    base, before = layer.weight.clone(), torch.cuda.memory_allocated()
    switch = WeightSwitch({"one": {"m": products}}, on_host=True)
    switch.hold("m", "whole", layer, {}, loaded=dict(layer.named_parameters()))
    assert torch.cuda.memory_allocated() - before < layer.weight.nbytes // 2
    switch.set("m", "whole", (("one", 1.0),))
    assert not layer.weight.equal(base)
    switch.set("m", "whole", ())
    assert layer.weight.equal(base)


@pytest.mark.gpu
def test_changes_of_weights_on_a_gpu_are_timed_when_they_have_ended() -> None:
    times, layer = rank_resources().get(SwitchTimes), linear().cuda()
    times.forget()
    switch = WeightSwitch(ADDITIONS)
    switch.hold("m", "whole", layer, {}, loaded=dict(layer.named_parameters()))
    switch.set("m", "whole", (("one", 1.0),))  # compiles kernels, which may take longer than the step below
    torch.cuda.synchronize()
    times.forget()
    torch.cuda._sleep(10**9)  # type: ignore[no-untyped-call]  # a step, about half a second
    switch.set("m", "whole", ())
    assert times.take_ms() == 0, "it waits for the step"
    torch.cuda.synchronize()
    assert times.take_ms() > 0
    assert times.take_ms() == 0


WIDE = (768, 1024)
"""Sizes of weights with several tiles."""
FACTORS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
WIDE_MIXES: tuple[Mix, ...] = ((("one", 0.8),), (("one", 1.0), ("two", -0.5)), ())


def wide_low_ranks(dtype: torch.dtype) -> dict[str, LowRank]:
    found = {}
    for name, rank in (("one", 64), ("two", 12)):
        up_NR, down_RK = 0.5 * random(WIDE[0], rank, seed=rank), random(rank, WIDE[1], seed=rank + 1)
        found[name] = LowRank(up_NR=up_NR.to(dtype), down_RK=down_RK.to(dtype), scale=0.5)
    return found


def wide_linear() -> nn.Linear:
    layer = nn.Linear(WIDE[1], WIDE[0], dtype=torch.bfloat16, device="cuda").requires_grad_(False)
    layer.weight.copy_(random(*WIDE, seed=0))
    return layer


def wide_switch(
    module: nn.Module, low_ranks: Mapping[str, LowRank], slices: Mapping[str, Any] | None = None, **how: Any
) -> WeightSwitch:
    on_host = how.pop("on_host", False)
    switch = WeightSwitch({name: {"m": {"weight": one}} for name, one in low_ranks.items()}, on_host=on_host)
    switch.hold("m", "whole", module, slices or {}, **{"loaded": dict(module.named_parameters()), **how})
    return switch


@pytest.mark.gpu
@pytest.mark.parametrize("name", FACTORS)
def test_sums_on_a_gpu_are_rounded_as_exact_ones_are(name: str) -> None:
    """Sums near the middle of two numbers may differ by float32 errors: 1 % of all at most."""
    layer, low_ranks = wide_linear(), wide_low_ranks(FACTORS[name])
    base, switch = layer.weight.clone(), wide_switch(layer, low_ranks)
    for mix in WIDE_MIXES:
        switch.set("m", "whole", mix)
        amounts = [(amount, low_ranks[one]) for one, amount in mix]
        wanted, got = exact(base.cpu(), *amounts), layer.weight.cpu()
        assert (got != wanted.bfloat16()).sum() <= got.numel() // 100
        absolute = [(amount, one.up_NR.double().abs() @ one.down_RK.double().abs()) for amount, one in amounts]
        size = wanted.abs() + sum(abs(amount) * product for amount, product in absolute)
        half_unit = torch.ldexp(torch.ones_like(wanted), torch.frexp(wanted).exponent - 9)
        assert ((got - wanted).abs() <= half_unit + 80 * 2**-23 * size).all()
    assert layer.weight.equal(base)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FACTORS)
def test_what_a_gpu_switches_has_the_bits_of_what_it_merges(name: str) -> None:
    """This holds with loaded values on the host, a rank's share, a quantised layer and a float8 GEMM."""
    low_ranks = wide_low_ranks(FACTORS[name])
    plain, hosted, share, replaced, holder = (wide_linear() for _ in range(5))
    share.weight = nn.Parameter(share.weight[:, 512:].contiguous(), requires_grad=False)
    slices = {"weight": Slice(name="weight", dim=1, ranges=((512, WIDE[1]),))}
    layer = LAYERS["int8"](replaced)
    gemm = Float8Gemm([WeightPart(parameter=cast("nn.Parameter", holder.weight))], None)
    writers = {parameter: (write,) for parameter, write in gemm.writers()}
    switches = [
        wide_switch(plain, low_ranks),
        wide_switch(hosted, low_ranks, on_host=True),
        wide_switch(share, low_ranks, slices),
        wide_switch(layer, low_ranks, loaded=dict(replaced.named_parameters())),
        wide_switch(holder, low_ranks, writers=writers),
    ]
    for mix in WIDE_MIXES:
        merged = wide_linear()
        merge(merged, [(amount, {"weight": low_ranks[one]}) for one, amount in mix], {})
        for switch in switches:
            switch.set("m", "whole", mix)
        quantised = LAYERS["int8"](merged)
        expected = Float8Gemm([WeightPart(parameter=cast("nn.Parameter", merged.weight))], None)
        assert plain.weight.equal(merged.weight)
        assert hosted.weight.equal(merged.weight)
        assert share.weight.equal(merged.weight[:, 512:])
        assert layer.weight_NK.equal(quantised.weight_NK)
        assert layer.scale_1N.equal(quantised.scale_1N)
        assert gemm.weight_NK.float().equal(expected.weight_NK.float())
        assert gemm.scale_1N.equal(expected.scale_1N)
