"""When a recorded algorithm is taken, and when PyTorch's own call is."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from engines.torch_engine.cublaslt import CublasLtError, choice, recorded_matmul
from engines.torch_engine.cublaslt.table import table_of
from engines.torch_engine.product import NativeProduct

H200 = table_of("NVIDIA H200")
assert H200 is not None
KNOWN = H200.recorded[0].problem
CACHES = (choice._matmul, choice._algorithms, choice._library)


@pytest.fixture
def here() -> Iterator[Any]:
    """As if there were a GPU; ``taken`` has the problems of which a product was made."""
    taken: list[Any] = []
    there = SimpleNamespace(
        gpu="NVIDIA H200", version="13.1", taken=taken, make=lambda problem, *_: taken.append(problem)
    )
    for cached in CACHES:
        cached.cache_clear()
    with (
        patch.object(choice.torch.cuda, "get_device_name", lambda _: there.gpu),
        patch.object(choice, "_library", lambda _: SimpleNamespace(version=there.version)),
        patch.object(choice, "Matmul", lambda *arguments: there.make(*arguments) or "matmul"),
    ):
        yield there
    for cached in CACHES:
        cached.cache_clear()


def operand(rows: int, columns: int, **changes: Any) -> Any:
    lies: dict[str, Any] = {"is_cuda": True, "dtype": torch.bfloat16, "is_contiguous": lambda: True}
    lies |= {"data_ptr": lambda: 4096, "device": torch.device("cuda", 0), "shape": (rows, columns)}
    return SimpleNamespace(**(lies | changes))


def choose(**changes: Any) -> Any:
    x = operand(KNOWN.rows, KNOWN.inner)
    return recorded_matmul(x, operand(KNOWN.features, KNOWN.inner), KNOWN.epilogue, None, operand(1, 1, **changes))


def test_what_was_recorded_is_taken(here: Any) -> None:
    assert choose() == "matmul"
    assert choose() == "matmul"
    assert here.taken == [KNOWN]  # once


@pytest.mark.parametrize(
    "changes",
    [{"dtype": torch.float16}, {"is_contiguous": lambda: False}, {"data_ptr": lambda: 4104}],
    ids=["dtype", "gaps", "address"],
)
def test_operands_that_lie_otherwise(here: Any, changes: dict[str, Any]) -> None:
    assert choose(**changes) is None


def test_other_sizes(here: Any) -> None:
    weight = operand(KNOWN.features, KNOWN.inner)
    assert recorded_matmul(operand(KNOWN.rows + 1, KNOWN.inner), weight, KNOWN.epilogue) is None


def test_another_gpu(here: Any) -> None:
    here.gpu = "NVIDIA GeForce RTX 5090"
    assert choose() is None


def test_another_version_is_said_once(here: Any, caplog: pytest.LogCaptureFixture) -> None:
    here.version = "13.4"
    assert choose() is None
    assert choose() is None
    (message,) = caplog.messages
    assert message == "algorithms were recorded with cuBLASLt 13.1, this is 13.4: its own are taken"


def test_an_algorithm_that_is_refused(here: Any, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: Any) -> None:
        raise CublasLtError("no")

    here.make = refuse
    assert choose() is None
    assert "is not taken: no" in caplog.text


def test_nothing_is_asked_on_the_cpu() -> None:
    x = torch.zeros(KNOWN.rows, KNOWN.inner, dtype=torch.bfloat16)
    with patch.object(choice, "_library", side_effect=AssertionError):
        assert recorded_matmul(x, torch.zeros(1, KNOWN.inner, dtype=torch.bfloat16), "none") is None


@pytest.mark.parametrize("call", ["plain", "biased", "activated", "added"])
def test_a_product_hands_over_what_it_has(call: str) -> None:
    x, weight, bias, out = torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(5), torch.zeros(3, 5)
    calls = {
        "plain": ("none", None, lambda: NativeProduct(weight, None)(x, out)),
        "biased": ("bias", bias, lambda: NativeProduct(weight, bias)(x, out)),
        "activated": ("gelu", bias, lambda: NativeProduct(weight, bias).activated(x)),
        "added": ("add", None, lambda: NativeProduct(weight, None).add(out, x)[0]),
    }
    epilogue, expected_bias, run = calls[call]
    with patch("engines.torch_engine.product.recorded_matmul") as chosen:
        answer = run()
    assert chosen.call_args.args[:3] == (x, weight, epilogue)
    assert answer is chosen.return_value.return_value
    given = chosen.return_value.call_args.args
    assert given[:3] == (x, weight, expected_bias)
    assert given[3:] == (() if call == "activated" else (out,))
