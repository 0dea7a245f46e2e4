"""The trained models run through engine graphs: predictions of all ranks, and a whole picture of four ranks."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from engines.core.model import Branch
from engines.core.spec import ParallelSpec
from engines.tensorrt_engine.build.builder import Profile
from engines.tensorrt_engine.build.report import read_engine_text
from engines.tensorrt_engine.export.buckets import divides_evenly, profile_over, varying_dims
from engines.tensorrt_engine.export.trace import offline_team
from pipelines.checkpoint import Checkpoint
from pipelines.loading import shipped_checkpoints
from pipelines.run import load_pipeline
from tests.engines.tensorrt_engine.conftest import Build
from tests.engines.tensorrt_engine.support.all_ranks import Case, SimulatedEngine, export_case, relative_error
from tests.engines.tensorrt_engine.support.cases import DTYPES, TOLERANCE
from tests.engines.tensorrt_engine.support.shipped import (
    NAMES,
    SIZES,
    first_branch,
    load,
    predicted,
    request_for,
    twice,
)

MIN_PSNR_DB = 40.0
DIVISIONS = (
    ("ulysses", 2), ("ulysses", 4), ("allgather_kv", 2), ("allgather_kv", 4), ("hybrid", 4), ("tensor", 2),
    ("tensor", 4),
)  # fmt: skip
EVERY_RUN: set[tuple[str, tuple[str, int], str]] = set()
"""The first of them makes a whole picture in every run."""

pytestmark = pytest.mark.skipif(len(shipped_checkpoints()) < 2, reason="the trained models are not in this tree")


def cases(*, varying: bool) -> list[Any]:
    made = []
    for name, division, precision in itertools.product(NAMES, DIVISIONS, DTYPES):
        if not (varying and division[0] == "tensor"):
            in_every_run = not varying and (name, division, precision) in EVERY_RUN
            marks = () if in_every_run else (pytest.mark.slow,)
            strategy, num_ranks = division
            made.append(
                pytest.param(name, *division, precision, marks=marks, id=f"{name}-{strategy}{num_ranks}-{precision}")
            )
    return made


@functools.cache
def exported(name: str, strategy: str, num_ranks: int, precision: str) -> Case:
    inputs = first_branch(name, DTYPES[precision]).inputs
    return export_case(load(name, DTYPES[precision]), inputs, ParallelSpec.of(strategy, num_ranks))


def check_predictions(case: Case, name: str, precision: str, branch: Branch, exact: Branch) -> None:
    """Check ``branch``, which is ``exact`` in ``precision``. Skip bfloat16: onnxruntime has no CPU kernels for it."""
    if precision in TOLERANCE:
        whole = predicted(name, exact)
        for prediction in case.predictions(branch.inputs):
            assert relative_error(prediction, whole) <= TOLERANCE[precision]


def check_files(case: Case, precision: str, build_file: Build, profiles: Sequence[Profile] = ()) -> None:
    graph = case.exported.graph
    for target in ("sm89", "sm120"):
        text = read_engine_text(build_file(graph.serialized(), target, profiles=tuple(profiles)))
        assert text is not None
        assert text.collectives == graph.collectives()
        assert text.num_fused_attentions == (0 if precision == "fp32" else graph.num_attentions())


@pytest.mark.parametrize(("name", "strategy", "num_ranks", "precision"), cases(varying=False))
def test_trained_models_predict_alike_on_every_rank(
    build_file: Build, name: str, strategy: str, num_ranks: int, precision: str
) -> None:
    case = exported(name, strategy, num_ranks, precision)
    check_predictions(case, name, precision, first_branch(name, DTYPES[precision]), first_branch(name, torch.float32))
    check_files(case, precision, build_file)


@pytest.mark.parametrize(("name", "strategy", "num_ranks", "precision"), cases(varying=True))
def test_trained_models_in_a_range_of_batches_and_sizes(
    build_file: Build, name: str, strategy: str, num_ranks: int, precision: str
) -> None:
    """One graph serves a batch of two and another size, with one engine file and a profile over both."""
    dtype = DTYPES[precision]
    asked = [twice(first_branch(name, dtype, "wide")), first_branch(name, dtype, "narrow")]
    exact = [twice(first_branch(name, torch.float32, "wide")), first_branch(name, torch.float32, "narrow")]
    buckets = [branch.inputs for branch in asked]
    dynamic = varying_dims(buckets)
    assert set(dynamic["hidden_states"]) >= {0, 1 if name == "flux-shapes" else 2}, "the batch, and the sequence"
    case = export_case(load(name, dtype), buckets[0], ParallelSpec.of(strategy, num_ranks), dynamic=dynamic)
    for pair in zip(asked, exact, strict=True):
        check_predictions(case, name, precision, *pair)
    check_files(case, precision, build_file, [profile_over(case.exported, buckets)])


def test_a_size_that_a_hybrid_would_have_to_pad_gets_an_engine_of_its_own() -> None:
    """A rank's 45 tokens do not split into two equal shares of queries."""
    name, spec = "wan-shapes", ParallelSpec.of("hybrid", 4)
    model = load(name, torch.float32)
    with offline_team(spec) as team:
        answers = [divides_evenly(model, first_branch(name, torch.float32, size), team) for size in SIZES]
    assert answers == [False, True, True]
    with offline_team(ParallelSpec.of("ulysses", 4)) as team:
        assert divides_evenly(model, first_branch(name, torch.float32), team)


def test_a_whole_picture_of_four_ranks() -> None:
    """The picture has 20 steps; with one exchange broken it is another picture."""
    name, case = "flux-shapes", exported("flux-shapes", "ulysses", 4, "fp32")
    request = request_for(name)
    assert request.num_inference_steps == 20
    last = sum(case.exported.graph.collectives().values()) - 1
    engines = (None, SimulatedEngine(case=case, rank=3), SimulatedEngine(case=case, rank=3, skip_collectives={last}))
    expected, given, broken = (load_pipeline(Checkpoint.open(name), engine).run(request) for engine in engines)
    assert psnr_db(given, expected) >= MIN_PSNR_DB
    assert psnr_db(broken, expected) < MIN_PSNR_DB


def psnr_db(given: np.ndarray, expected: np.ndarray) -> float:
    error = np.mean((given.astype(np.float64) - expected.astype(np.float64)) ** 2)
    return float("inf") if error == 0 else float(10 * np.log10(255**2 / error))
