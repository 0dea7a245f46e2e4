"""Products by named algorithms: what cuBLASLt is asked, through a stand-in; on a GPU, what it answers."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from engines.torch_engine.cublaslt import Algorithm, CublasLt, CublasLtError, Epilogue, Matmul, Problem
from engines.torch_engine.cublaslt.algorithm import tiles_of
from engines.torch_engine.cublaslt.library import BIAS_POINTER, CLUSTER, EPILOGUE, OPTION, STAGES, TILE
from engines.torch_engine.cublaslt.matmul import WORKSPACE_BYTES
from engines.torch_engine.cublaslt.table import table_of

ALGORITHM = Algorithm(family=66, tile=20, stages=35, cluster=3, option=1)
NONE = Problem(rows=48, features=32, inner=16)


class Functions:
    """Stands in for libcublasLt: keeps what it is told, accepts everything, wants ``workspace_bytes``."""

    def __init__(self, *, workspace_bytes: int = 4, refuses: str = "") -> None:
        self.settings: list[tuple[int, int]] = []
        self.layouts: list[tuple[int, ...]] = []
        self.products: list[tuple[Any, ...]] = []
        self._workspace_bytes, self._refuses = workspace_bytes, refuses

    def cublasLtGetVersion(self) -> int:
        return 130204

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cublasLt"):
            raise AttributeError(name)
        method = getattr(self, f"_{name.removeprefix('cublasLt')}", lambda *_: None)

        def function(*arguments: Any) -> int:
            method(*arguments)
            return 7 if name == self._refuses else 0

        return function

    def _MatmulDescSetAttribute(self, _: Any, attribute: int, value: Any, size: Any) -> None:
        assert size.value == ctypes.sizeof(value._obj)
        self.settings.append((attribute, value._obj.value))

    def _MatmulAlgoConfigSetAttribute(self, algorithm: Any, attribute: int, value: Any, size: Any) -> None:
        self._MatmulDescSetAttribute(algorithm, 100 + attribute, value, size)

    def _MatrixLayoutCreate(self, _: Any, kind: int, *extent: Any) -> None:
        self.layouts.append((kind, *(each.value for each in extent)))

    def _MatmulAlgoCheck(self, *arguments: Any) -> None:
        arguments[-1]._obj.workspace_bytes = self._workspace_bytes

    def _MatmulAlgoCapGetAttribute(self, _: Any, attribute: int, tiles: Any, __: Any, size: Any) -> None:
        assert attribute == 6
        size._obj.value = 12
        if tiles is not None:
            tiles[:] = [5, 6, 9]

    def _Matmul(self, *arguments: Any) -> None:
        self.products.append(arguments)


@pytest.fixture(autouse=True)
def stream() -> Iterator[None]:
    if torch.cuda.is_available():
        yield
        return
    with patch("engines.torch_engine.cublaslt.matmul.torch.cuda.current_stream") as current:
        current.return_value.cuda_stream = 77
        yield


def matmul(problem: Problem, functions: Functions) -> Matmul:
    return Matmul(problem, ALGORITHM, CublasLt(functions))


def test_the_problem_is_told_column_by_column() -> None:
    functions = Functions()
    matmul(NONE, functions)
    assert functions.layouts == [(14, 16, 32, 16), (14, 16, 48, 16), (14, 32, 48, 32)]
    assert {(3, 1), (4, 0), (EPILOGUE, 1)} <= set(functions.settings)


def test_the_algorithm_is_told_setting_by_setting() -> None:
    functions = Functions()
    matmul(NONE, functions)
    assert {(100 + TILE, 20), (100 + STAGES, 35), (100 + CLUSTER, 3), (100 + OPTION, 1)} <= set(functions.settings)


@pytest.mark.parametrize(
    ("epilogue", "number", "beta"), [("none", 1, 0), ("bias", 4, 0), ("gelu", 36, 0), ("add", 1, 1)]
)
def test_a_call_says_where_everything_lies(epilogue: Epilogue, number: int, beta: float) -> None:
    functions = Functions()
    x_RK, weight_NK, out_RN = torch.zeros(48, 16), torch.zeros(32, 16), torch.zeros(48, 32)
    bias_N = torch.zeros(32) if epilogue in ("bias", "gelu") else None
    answer = matmul(Problem(rows=48, features=32, inner=16, epilogue=epilogue), functions)(
        x_RK, weight_NK, bias_N, out_RN
    )
    assert answer is out_RN
    assert (EPILOGUE, number) in functions.settings
    assert (BIAS_POINTER, bias_N.data_ptr() if bias_N is not None else 0) in functions.settings or bias_N is None
    (call,) = functions.products
    addresses = [call[n].value for n in (3, 5, 8, 10)]
    assert addresses == [weight_NK.data_ptr(), x_RK.data_ptr(), out_RN.data_ptr(), out_RN.data_ptr()]
    assert (call[2]._obj.value, call[7]._obj.value) == (1, beta)
    assert (call[14].value, call[15].value) == (WORKSPACE_BYTES, 77)


def test_what_is_not_given_is_made() -> None:
    answer = matmul(NONE, Functions())(torch.zeros(48, 16), torch.zeros(32, 16), None)
    assert answer.shape == (48, 32)


def test_streams_have_a_workspace_each() -> None:
    functions = Functions()
    call = matmul(NONE, functions)
    for number in (77, 78, 77):
        with patch("engines.torch_engine.cublaslt.matmul.torch.cuda.current_stream") as current:
            current.return_value.cuda_stream = number
            call(torch.zeros(48, 16), torch.zeros(32, 16), None)
    first, other, again = (arguments[13].value for arguments in functions.products)
    assert first == again != other


def test_a_refused_algorithm_says_so() -> None:
    with pytest.raises(CublasLtError, match=r"cuBLASLt 13\.2 cannot do Problem\(rows=48.*tile=20"):
        matmul(NONE, Functions(refuses="cublasLtMatmulAlgoCheck"))
    with pytest.raises(CublasLtError, match="cannot do"):
        matmul(NONE, Functions(workspace_bytes=WORKSPACE_BYTES + 1))


def test_a_refused_call_says_so() -> None:
    refusing = matmul(NONE, Functions(refuses="cublasLtMatmul"))
    with pytest.raises(CublasLtError, match="cublasLtMatmul refused: status 7"):
        refusing(torch.zeros(48, 16), torch.zeros(32, 16), None)


def test_a_family_has_tiles() -> None:
    assert tiles_of(66, CublasLt(Functions())) == [5, 6, 9]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_recorded_algorithms_are_as_exact_as_pytorchs_choice() -> None:
    """Bias, GELU and sum included; without its bias an answer would be seen to be wrong."""
    table = table_of(torch.cuda.get_device_name())
    if table is None:
        pytest.skip(f"nothing was recorded for {torch.cuda.get_device_name()}")
    library = CublasLt()
    assert library.version == table.version
    for problem, algorithm in table.algorithms.items():
        x, weight, bias, before = operands(problem)
        has_bias = problem.epilogue in ("bias", "gelu")
        got = Matmul(problem, algorithm, library)(x, weight, bias if has_bias else None, before.clone())
        exact = expected(problem, x.float(), weight.float(), bias.float(), before.float())
        theirs = expected(problem, x, weight, bias, before)
        error, usual = ((each.float() - exact).norm() / exact.norm() for each in (got, theirs))
        assert error <= 1.2 * usual, (problem, error, usual)


def operands(problem: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shapes = (
        (problem.rows, problem.inner),
        (problem.features, problem.inner),
        (problem.features,),
        (problem.rows, problem.features),
    )
    torch.manual_seed(0)
    x, weight, bias, before = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    return x, weight * problem.inner**-0.5, bias, before


def expected(problem: Problem, x: Tensor, weight: Tensor, bias: Tensor, before: Tensor) -> Tensor:
    """In the operands' own dtype, each operation by itself."""
    if problem.epilogue == "add":
        return torch.addmm(before, x, weight.t())
    if problem.epilogue == "none":
        return x @ weight.t()
    product = torch.addmm(bias, x, weight.t())
    return torch.nn.functional.gelu(product, approximate="tanh") if problem.epilogue == "gelu" else product
