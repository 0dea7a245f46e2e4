"""The fused quantisation of heads as an operation. ``triton_check.py`` and GPU tests check its arithmetic."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock

import pytest
import torch
from torch import Tensor

from engines.fast.fp8_heads import Fp8Inputs, fused_heads, quantise_heads
from engines.quantization.linear import FP8


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Replace the kernels by the plain version, for calls without an order."""

    def write(
        qkv: tuple[Tensor, Tensor, Tensor],
        order_BM: Tensor | None,
        num_keys_B: Tensor | None,
        out: tuple[Tensor, ...],
        min_amax: float,
    ) -> None:
        assert order_BM is None
        assert num_keys_B is None
        assert min_amax == 2.0**-64
        for target, values in zip(out, quantise_heads(*qkv, dim=out[0].shape[-1]), strict=True):
            target.copy_(values)

    launch = Mock(side_effect=write)
    monkeypatch.setitem(sys.modules, "engines.fast.triton_fp8_heads", SimpleNamespace(launch_heads=launch))
    monkeypatch.setattr(torch.cuda, "device", MagicMock())
    return launch


def heads() -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of a packed projection, batch innermost."""
    packed_LB3HD = torch.randn(9, 2, 3, 4, 6, generator=torch.Generator().manual_seed(1)).bfloat16()
    q, k, v = (packed_LB3HD[:, :, which].transpose(0, 1) for which in range(3))
    return q, k[:, :, :2], v[:, :, :2]


def test_outputs_have_the_plain_versions_shapes_and_dtypes(launch: Mock) -> None:
    given = heads()
    for dim in (None, 8):
        fused, plain = fused_heads(*given, dim=dim), quantise_heads(*given, dim=dim)
        assert isinstance(fused, Fp8Inputs)
        for one, other in zip(fused, plain, strict=True):
            assert one.is_contiguous()
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            assert one.float().equal(other.float())
    assert fused.q_BLHD.dtype == FP8
    assert launch.call_count == 2


def test_it_is_one_operation_of_a_compiled_graph(launch: Mock) -> None:
    given, graphs = heads(), list[torch.fx.GraphModule]()

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda *qkv: fused_heads(*qkv, dim=8).k_BMGD.float(), fullgraph=True, backend=backend)
    assert compiled(*given).equal(quantise_heads(*given, dim=8).k_BMGD.float())
    (graph,) = graphs
    assert [str(node.target) for node in graph.graph.nodes].count("troupe.fp8_heads.default") == 1
    launch.assert_called_once()


def test_kernels_are_launched_on_the_device_of_the_queries(launch: Mock) -> None:
    """Triton launches on the current device, and a thread's first one is GPU 0."""
    guard: MagicMock = torch.cuda.device  # type: ignore[assignment]
    fake = launch.side_effect

    def entered(*arguments: object) -> None:
        guard.return_value.__enter__.assert_called_once_with()
        guard.return_value.__exit__.assert_not_called()
        fake(*arguments)

    launch.side_effect = entered
    fused_heads(*heads())
    guard.assert_called_once_with(torch.device("cpu"))
    guard.return_value.__exit__.assert_called_once()
    launch.assert_called_once()


@pytest.mark.parametrize("amax", [448.0, 447.99997, 448.00003, 2.0**-20 * 448, 1.0, 3.4e38, 2.0**-70])
def test_the_scale_is_the_largest_power_of_two_that_fits(amax: float) -> None:
    q = torch.tensor([amax, -amax / 3]).view(1, 1, 1, 2)
    given = quantise_heads(q, q, q)
    factor = float(given.q_descale_BG.double().item())
    largest = max(float(q.abs().max().double()), 2.0**-64)
    assert factor == 2.0 ** round(torch.tensor(factor).double().log2().item())
    assert largest / factor <= 448 < 2 * largest / factor


def test_infinite_values_show_in_the_answer() -> None:
    q, k, v = (torch.randn(1, 3, 1, 4) for _ in range(3))
    v[0, 1, 0, 2] = torch.inf
    assert quantise_heads(q, k, v).v_BMGD.float().isnan().all()
