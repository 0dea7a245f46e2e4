"""Traced code is rewritten if the result is the same, and only then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.nn import functional

from engines.fast.gemm import GELU_PRODUCT, gelu_product
from engines.torch_engine import rewrites
from engines.torch_engine.rewrites import make_products_real, real_product, rewrite

Function = Callable[[Tensor, Tensor], Any]


def rotated(x: Tensor, freqs: Tensor) -> Tensor:
    turned = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(turned * freqs.unsqueeze(1)).flatten(-2).type_as(x)


def as_complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))  # type: ignore[no-untyped-call]


def rotated_from_the_left(x: Tensor, freqs: Tensor) -> Tensor:
    return torch.view_as_real(torch.mul(freqs.unsqueeze(1), as_complex(x)))


def two(x: Tensor, freqs: Tensor) -> tuple[Tensor, Tensor]:
    return rotated(x, freqs), rotated(2 * x, freqs)


def seen_as_complex(x: Tensor, freqs: Tensor) -> Tensor:
    turned = as_complex(x) * freqs.unsqueeze(1)
    return turned.abs()


def scaled(x: Tensor, freqs: Tensor) -> Tensor:
    return torch.view_as_real(as_complex(x) * 3.0)


def store_rotated(x: Tensor, freqs: Tensor) -> Tensor:
    """Write into a given tensor as well, like a block that fills a cache of keys."""
    x.copy_(rotated(x, freqs))
    return freqs.abs()


def tensors() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(5, 3, 8), torch.polar(torch.ones(5, 4), torch.randn(5, 4))


def rewritten(
    rewriting: Callable[[Graph], int], function: Callable[..., Any], *given: Any
) -> tuple[Any, int, list[Any]]:
    """Return the answer of compiled code after ``rewriting``, how often it did, and what the code calls."""
    counted, calls = [], list[Any]()

    def backend(traced: GraphModule, inputs: Any) -> Any:
        counted.append(rewriting(traced.graph))
        traced.recompile()
        calls.extend(node.target for node in traced.graph.nodes)
        return traced

    torch._dynamo.reset()
    answer = torch.compile(function, backend=backend, fullgraph=True)(*given)
    return answer, sum(counted), calls


@pytest.mark.parametrize(
    ("function", "num_products"),
    [(rotated, 1), (rotated_from_the_left, 1), (two, 2), (seen_as_complex, 0), (scaled, 0), (store_rotated, 1)],
)
def test_the_rewritten_graph_gives_the_same(function: Function, num_products: int) -> None:
    given, expected = tensors(), tensors()
    answer, num_rewritten, calls = rewritten(make_products_real, function, *given)
    torch.testing.assert_close(answer, function(*expected), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(given, expected, rtol=1e-6, atol=1e-6)
    assert num_rewritten == calls.count(real_product) == num_products
    assert (torch.view_as_complex in calls) is (num_products == 0)


def mlp(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str = "tanh") -> Tensor:
    return functional.gelu(functional.linear(x, weight, bias), approximate=approximate)


def read_twice(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    inner = functional.linear(x, weight, bias)
    return functional.gelu(inner, approximate="tanh") + inner


def of_no_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return functional.gelu(x @ weight.t(), approximate="tanh")


@pytest.mark.parametrize(
    ("function", "has_bias", "num_fused"),
    [
        (mlp, True, 1),
        (lambda x, weight, bias: mlp(mlp(x, weight, bias)[..., :6], weight, bias), True, 2),
        (mlp, False, 0),
        (lambda x, weight, bias: mlp(x, weight, bias, "none"), True, 0),
        (read_twice, True, 0),
        (of_no_product, True, 0),
    ],
)
def test_gelu_is_computed_in_the_product(
    monkeypatch: pytest.MonkeyPatch, function: Callable[..., Tensor], has_bias: bool, num_fused: int
) -> None:
    monkeypatch.setattr(rewrites, "has_gelu_epilogue", lambda x: True)
    x, weight, bias = torch.randn(2, 3, 6), torch.randn(8, 6), torch.randn(8) if has_bias else None
    answer, num_rewritten, calls = rewritten(rewrite, function, x, weight, bias)
    torch.testing.assert_close(answer, function(x, weight, bias))
    assert num_rewritten == calls.count(GELU_PRODUCT) == num_fused
    assert calls.count(functional.gelu) == (0 if num_fused else 1)


def test_a_product_with_gelu_is_an_operator() -> None:
    """The rest is checked on a GPU: on the CPU nothing is rewritten."""
    x, weight, bias = torch.randn(2, 3, 6), torch.randn(8, 6), torch.randn(8)
    torch.library.opcheck(gelu_product, (x, weight, bias))
    assert not rewrites.has_gelu_epilogue(x.bfloat16())
