"""The installed TensorRT builds each collective, with known limits.

The refusals are asserted too: a version that lifts a limit fails here, and the limit can then be taken out of
``engines/tensorrt_engine``.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from engines.tensorrt_engine.build.bindings import Target
from engines.tensorrt_engine.build.builder import BuildError, BuildOptions, build
from engines.tensorrt_engine.build.report import read_engine_text
from tests.engines.tensorrt_engine.conftest import Build
from tests.engines.tensorrt_engine.support.engine_file import num_ranks_of
from tests.engines.tensorrt_engine.support.one_layer import (
    ROOTED,
    SYMMETRIC,
    attention_network,
    collective,
    collective_network,
)

TARGETS = ("sm89", "sm120")
SIZES = (2, 4)
DTYPES = ("FLOAT", "FLOAT16", "BFLOAT16", "INT8", "INT32", "INT64", "BOOL")
ROOTED_DTYPES = ("FLOAT", "FLOAT16", "INT32", "BOOL")


def symmetric_cases() -> list[Any]:
    """Return every operation in every dtype, for two and four ranks and both targets. In quick runs each operation and
    dtype meets every target with every size, but not all three at once."""
    cases = []
    for (row, operation), (column, dtype) in itertools.product(enumerate(SYMMETRIC), enumerate(DTYPES)):
        for (place, num_ranks), (number, target) in itertools.product(enumerate(SIZES), enumerate(TARGETS)):
            marks = () if (row + column + place + number) % 2 == 0 else (pytest.mark.slow,)
            cases.append(pytest.param(operation, dtype, num_ranks, target, marks=marks))
    return cases


@pytest.mark.parametrize(("operation", "dtype", "num_ranks", "target"), symmetric_cases())
def test_symmetric_collective_is_in_the_engine_file(
    build_file: Build, operation: str, dtype: str, num_ranks: int, target: str
) -> None:
    engine_file = build_file(collective_network(collective(operation, num_ranks), dtype), target)
    text = read_engine_text(engine_file)
    assert text is not None
    assert text.collectives == {operation: 1}
    assert num_ranks_of(engine_file) == num_ranks


@pytest.mark.parametrize("reduction", ["sum", "prod", "max", "min", "avg"])
@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "reduce"])
def test_every_reduction_builds_a_file_of_its_own(build_file: Build, operation: str, reduction: str) -> None:
    engine_file = build_file(collective_network(collective(operation, reduction=reduction), "FLOAT16"))
    other = build_file(
        collective_network(collective(operation, reduction="max" if reduction == "sum" else "sum"), "FLOAT16")
    )
    assert engine_file != other


def rooted_cases() -> list[Any]:
    """Return every operation in every dtype; each operation and each dtype meets both targets."""
    cases = []
    for (row, operation), (column, dtype) in itertools.product(enumerate(ROOTED), enumerate(ROOTED_DTYPES)):
        for number, target in enumerate(TARGETS):
            marks = () if (row + column + number) % 2 == 0 else (pytest.mark.slow,)
            cases.append(pytest.param(operation, dtype, target, marks=marks))
    return cases


@pytest.mark.parametrize(("operation", "dtype", "target"), rooted_cases())
def test_rooted_collective_builds(build_file: Build, operation: str, dtype: str, target: str) -> None:
    assert b"node_of_y" in build_file(collective_network(collective(operation), dtype), target)


@pytest.mark.parametrize(
    ("dtype", "reason"),
    [
        ("BFLOAT16", "does not support BF16 asymmetric DistCollective"),
        ("INT8", "cannot be quantized"),
        ("INT64", "not supported for collective"),
    ],
)
@pytest.mark.parametrize("operation", ROOTED)
def test_rooted_collective_is_refused(build_file: Build, operation: str, dtype: str, reason: str) -> None:
    with pytest.raises(BuildError, match=reason):
        build_file(collective_network(collective(operation), dtype))


@pytest.mark.parametrize(("dtype", "reason"), [("FLOAT8E4M3FN", "datatype FP8"), ("UINT8", "datatype UInt8")])
@pytest.mark.parametrize("operation", SYMMETRIC + ROOTED)
def test_no_collective_takes(build_file: Build, operation: str, dtype: str, reason: str) -> None:
    with pytest.raises(BuildError, match=reason):
        build_file(collective_network(collective(operation), dtype))


@pytest.mark.parametrize("operation", SYMMETRIC)
def test_groups_are_dropped_in_silence(build_file: Build, operation: str) -> None:
    """pytorch/TensorRT #4380. When this fails, TensorRT has begun to heed groups: revisit the hybrid strategy."""
    what = collective(operation)
    engine_files = [build_file(collective_network(what, "FLOAT16", groups)) for groups in ([], [0, 1], [2, 3])]
    assert engine_files[0] == engine_files[1] == engine_files[2]


def test_a_rebuild_is_byte_identical(build_file: Build) -> None:
    """The test above relies on this: equal files mean equal networks."""
    network = collective_network(collective("all_to_all"), "FLOAT16")
    assert build(network, BuildOptions(target=Target.parse("sm89"))).engine_file == build_file(network)


def test_rows_must_divide_by_ranks(build_file: Build) -> None:
    with pytest.raises(BuildError):
        build_file(collective_network(collective("all_to_all", num_ranks=3), "FLOAT16"))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["FLOAT16", "BFLOAT16"])
def test_half_precision_attention_is_fused(build_file: Build, dtype: str, target: str) -> None:
    text = read_engine_text(build_file(attention_network(dtype, TRT_decomposable=0), target))
    assert text is not None
    assert text.num_fused_attentions == 1


def test_attention_without_a_kernel_is_refused_unless_decomposable(build_file: Build) -> None:
    with pytest.raises(BuildError, match="not supported by a dedicated kernel"):
        build_file(attention_network("FLOAT", TRT_decomposable=0))
    text = read_engine_text(build_file(attention_network("FLOAT", TRT_decomposable=1)))
    assert text is not None
    assert text.num_fused_attentions == 0


@pytest.mark.parametrize("target", TARGETS)
def test_native_ring_attention_does_not_build_in_rtx(build_file: Build, target: str) -> None:
    with pytest.raises(BuildError, match="RingAttention unsupported"):
        build_file(attention_network("FLOAT16", TRT_decomposable=0, nb_rank=2), target)
