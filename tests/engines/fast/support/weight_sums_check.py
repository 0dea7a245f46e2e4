"""Compare the kernel's sums of weights and low-rank products with float64; run it like ``triton_check.py``."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[4]))

from engines.additions import WeightSwitch
from engines.core.model import Addition, LowRank, Mix
from engines.fast import triton_weight_sums, weight_sums
from engines.fast.records import Products
from engines.fast.weight_sums import WeightSums, prepared

SHAPES = {"wide": (24, 40), "bias": (19,), "odd": (7, 37), "filter": (8, 2, 2, 4)}


def random_low_rank(shape: tuple[int, ...], rank: int, dtype: torch.dtype) -> LowRank:
    up_NR, down_RK = torch.randn(shape[0], rank), torch.randn(rank, torch.Size(shape[1:]).numel())
    return LowRank(up_NR=up_NR.to(dtype), down_RK=down_RK.to(dtype), scale=0.3)


def moved(products: Products, device: str) -> Products:
    return [(amount, prepared(one, torch.device(device))) for amount, one in products]


def exact_sum(base: Tensor, products: Products) -> tuple[Tensor, Tensor]:
    """Return the sum in float64, and the largest error of one in float32 with summands in any order."""
    exact_NK = base.double().view(base.shape[0], -1)
    size_NK, length = exact_NK.abs(), len(products)
    for amount, one in products:
        up_NR, down_RK = one.up_NR.double(), one.down_RK.double()
        exact_NK = exact_NK + amount * one.scale * (up_NR @ down_RK)
        size_NK = size_NK + abs(amount * one.scale) * (up_NR.abs() @ down_RK.abs())
        length += up_NR.shape[1]
    return exact_NK.view(base.shape), (length * 2**-23 * size_NK).view(base.shape)


def check_sum(got: Tensor, base: Tensor, products: Products) -> None:
    """Check rounding to nearest, except near the middle of two numbers, where float32 errors matter."""
    exact, bound = exact_sum(base, products)
    got = got.cpu()
    lowest, highest = ((exact + error).to(got.dtype).double() for error in (-bound, bound))
    assert got.dtype == base.dtype
    assert ((lowest <= got) & (got <= highest)).all(), (got - exact).abs().max()
    if got.dtype == torch.float32:
        assert (got - exact).norm() <= 2e-6 * exact.norm()
    else:
        assert (got != exact.to(got.dtype)).sum() <= max(2, got.numel() // 100)


def launched_on(device: str) -> AbstractContextManager[Any]:
    """Return a context in which tensors of ``device`` have a kernel. On a CPU, tiles are smaller than the weights."""
    if device == "cuda":
        return nullcontext()
    stack = ExitStack()
    tiles = dict.fromkeys(triton_weight_sums.TILES, triton_weight_sums.Tile(16, 32, 32, 4))
    stack.enter_context(patch.object(torch.cuda, "device", MagicMock()))
    stack.enter_context(patch.object(weight_sums, "DEVICE_TYPE", device))
    stack.enter_context(patch.multiple(triton_weight_sums, TILES=tiles, FLOAT32_PRECISION="ieee"))
    return stack


def check_launches(device: str, weight: torch.dtype, factor: torch.dtype, num_products: int) -> None:
    """Check several weights in one launch: ranks below and above a tile's, rows within wider ones, in place."""
    sums, checks = WeightSums(), []
    for shape in SHAPES.values():
        products = [(0.7 - i, random_low_rank(shape, 5 + 70 * i, factor)) for i in range(num_products)]
        base = torch.randn(shape).to(weight)
        in_place, into = base.clone().to(device), torch.empty(shape, dtype=weight, device=device)
        if len(shape) == 2:
            into = torch.empty(shape[0], shape[1] + 8, dtype=weight, device=device)[:, : shape[1]]
        sums.add(base.to(device), moved(products, device), into)
        sums.add(in_place, moved(products, device), in_place)
        checks += [(into, base, products), (in_place, base, products)]
    with patch.object(weight_sums, "_launch", wraps=weight_sums._launch) as launch:
        sums.flush()
    assert launch.call_count == 2, "one for aligned weights, and one for others"
    for got, base, products in checks:
        check_sum(got, base, products)


def check_shares_are_alike(factor: torch.dtype) -> None:
    """Check that a rank's rows and columns have the same bits as in the whole weight, aligned or not."""
    base = torch.randn(270, 304).bfloat16()
    products = [(0.7, random_low_rank((270, 304), 72, factor))]
    whole = weight_sums.new_sum(base.cuda(), moved(products, "cuda"))
    for rows, columns in ((slice(130, 270), slice(None)), (slice(None), slice(152, 304)), (slice(3), slice(5, 9))):
        own = [(each, replace(x, up_NR=x.up_NR[rows], down_RK=x.down_RK[:, columns])) for each, x in products]
        share = weight_sums.new_sum(base[rows, columns].contiguous().cuda(), moved(own, "cuda"))
        assert share.equal(whole[rows, columns]), (rows, columns)


class Quantised(nn.Module):
    """Stands for a layer with a quantised weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.bias = linear.bias

    def write_weight(self, weight: Tensor) -> None:
        self.written = weight.to(self.bias.dtype, copy=True)


MIXES: tuple[Mix, ...] = (
    (("half", 1.0),),
    (("full", 0.5),),
    (("half", -1.0), ("other", 0.3)),
    (("half", 1.0), ("full", 2.0)),
    (),
)


def check_switch(device: str, half: torch.dtype, *, on_host: bool) -> None:
    """Check all forms of weights and products, with loaded values on the device or the host; then back."""
    weights = nn.ParameterDict({name: torch.randn(shape).to(half) for name, shape in SHAPES.items()})
    module = nn.ModuleDict({"w": weights, "quantised": nn.Linear(8, 24, dtype=half), "full": nn.Linear(16, 8)})
    module = module.to(device).requires_grad_(False)
    loaded = dict(module.named_parameters())
    base = {name: each.cpu().clone() for name, each in loaded.items()}
    module["quantised"] = quantised = Quantised(module["quantised"])  # type: ignore[arg-type]
    products_of: dict[str, dict[str, LowRank]] = {}
    for addition, dtype in (("half", half), ("full", torch.float32), ("other", half)):
        products_of[addition] = {name: random_low_rank(tuple(x.shape), 3, dtype) for name, x in base.items()}
    two_dtypes = products_of["half"]["w.bias"]
    products_of["half"]["w.bias"] = replace(two_dtypes, up_NR=two_dtypes.up_NR.float())
    table: dict[str, Addition] = {addition: {"m": products} for addition, products in products_of.items()}
    with launched_on(device):
        switch = WeightSwitch(table, device=torch.device(device) if on_host else None, on_host=on_host)
        weight_sums.warm_up.cache_clear()
        with patch.object(weight_sums, "_launch", wraps=weight_sums._launch) as launch:
            switch.hold("m", "whole", module, {}, loaded=loaded)
        warm = {call.args[1] for call in launch.call_args_list}
        for mix in MIXES:
            versions = {name: each._version for name, each in loaded.items()}
            with patch.object(weight_sums, "_launch", wraps=weight_sums._launch) as launch:
                switch.set("m", "whole", mix)
            assert launch.called == bool(mix)
            assert {call.args[1] for call in launch.call_args_list} <= warm
            for name, parameter in loaded.items():
                is_quantised = name == "quantised.weight"
                assert not is_quantised or parameter.cpu().equal(base[name]), "its layer has another one"
                assert (parameter._version > versions[name]) != is_quantised
                got = quantised.written if is_quantised else parameter
                if mix:
                    check_sum(got, base[name], [(amount, products_of[addition][name]) for addition, amount in mix])
                else:
                    assert got.cpu().equal(base[name])


def main(device: str) -> None:
    torch.manual_seed(0)
    half = torch.bfloat16 if device == "cuda" else torch.float16  # the interpreter multiplies no bfloat16
    for weight in (half, torch.float32):
        for factor in (half, torch.float32):
            for num_products in (1, 2):
                with launched_on(device):
                    check_launches(device, weight, factor, num_products)
    for factor in (torch.bfloat16, torch.float32) if device == "cuda" else ():  # NumPy's order depends on the place
        check_shares_are_alike(factor)
    for on_host, limit in ((False, 2**27), (True, 0)):
        with patch.object(weight_sums, "MAX_TEMPORARY_BYTES", limit):
            check_switch(device, half, on_host=on_host)
    print("all sums agree")


if __name__ == "__main__":
    main(sys.argv[1])
