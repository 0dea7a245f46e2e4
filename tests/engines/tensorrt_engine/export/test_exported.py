"""Exported engines equal the unsharded model on all ranks for every strategy, and can be built."""

from __future__ import annotations

import functools
from dataclasses import replace

import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from engines.core.model import Branch
from engines.core.spec import ParallelSpec
from engines.parallel.collectives import Axis, all_to_all
from engines.tensorrt_engine.build.builder import BuildError
from engines.tensorrt_engine.build.report import read_engine_text
from engines.tensorrt_engine.export.buckets import profile_over, varying_dims
from engines.tensorrt_engine.export.exported import export
from engines.tensorrt_engine.export.graph import EngineGraph, export_graph
from engines.tensorrt_engine.export.trace import offline_team
from tests.engines.tensorrt_engine.conftest import Build, Exports
from tests.engines.tensorrt_engine.support.all_ranks import export_case, relative_error
from tests.engines.tensorrt_engine.support.cases import ATTENTIONS, DTYPES, TOLERANCE, Key, for_targets, params
from tests.engines.tensorrt_engine.support.engine_file import num_ranks_of
from tests.engines.tensorrt_engine.support.zoo import SPECIMENS, cast, reference

CONTROL = 20
"""Factor by which a prediction with broken exchanges must exceed the error of a good one."""


@functools.cache
def expected(family: str) -> Tensor:
    specimen = SPECIMENS[family]
    return reference(specimen.model(), specimen.inputs())


@pytest.mark.parametrize("key", params(dtypes=("fp32", "fp16")))
def test_every_rank_predicts_what_one_device_does(exports: Exports, key: Key) -> None:
    inputs = cast(SPECIMENS[key.family], SPECIMENS[key.family].inputs(), DTYPES[key.dtype])
    for prediction in exports(key).predictions(inputs):
        assert relative_error(prediction, expected(key.family)) <= TOLERANCE[key.dtype]


@pytest.mark.parametrize("key", params(dtypes=("fp32", "fp16")))
def test_control_broken_exchanges_are_seen(exports: Exports, key: Key) -> None:
    """With every exchange of the blocks broken the error is ``CONTROL`` times the tolerance.

    With only the last one broken it depends on what that exchange carries. In tensor parallelism one MLP's sum beside
    all blocks' residual stream moves the prediction by 10 %. Half precision tolerates a twentieth of this, or a little
    more. So a single one must exceed the good run's error ``CONTROL`` times, and the tolerance clearly.
    """
    case, whole = exports(key), expected(key.family)
    inputs = cast(SPECIMENS[key.family], SPECIMENS[key.family].inputs(), DTYPES[key.dtype])
    last = sum(key.collectives().values()) - 2
    good = relative_error(case.predictions(inputs)[-1], whole)
    one_broken = relative_error(case.predictions(inputs, skip_collectives={last})[-1], whole)
    all_broken = relative_error(case.predictions(inputs, skip_collectives=range(last + 1))[-1], whole)
    assert not one_broken <= CONTROL * good
    assert not one_broken <= 5 * TOLERANCE[key.dtype]
    assert not all_broken <= CONTROL * TOLERANCE[key.dtype]


@pytest.mark.parametrize("key", params())
def test_graph_holds_the_expected_nodes(exports: Exports, key: Key) -> None:
    case = exports(key)
    graph = case.exported.graph
    assert graph.collectives() == key.collectives()
    assert graph.num_attentions() == ATTENTIONS[key.family]
    assert set(graph.weights) <= set(case.weights[0])
    assert graph.num_ranks == key.num_ranks


CLIPS = ("Max", "Min")
HALVES = {int(ir.DataType.BFLOAT16): int(ir.DataType.FLOAT16)}


def nodes(graph: EngineGraph) -> list[tuple[object, ...]]:
    """Return every node with its inputs and attributes: half precisions alike, without clips, results by number."""
    made: dict[ir.Value | None, object] = {}
    found: list[tuple[object, ...]] = []
    for node in graph.model.graph:
        if node.op_type in CLIPS:
            made[node.outputs[0]] = made[node.inputs[0]]
            continue
        told = {name: HALVES.get(a.value, a.value) for name, a in node.attributes.items() if name != "value"}
        found.append((node.op_type, [made.get(value, value and value.is_graph_input() and value.name)
                                     for value in node.inputs], told))  # fmt: skip
        made |= {value: (len(found), index) for index, value in enumerate(node.outputs)}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("key", params(dtypes=("bf16",)))
def test_bfloat16_has_the_graph_of_float16(exports: Exports, key: Key) -> None:
    """onnxruntime has no bfloat16 on a CPU. The float16 graph is tested above; the bfloat16 graph differs only in that
    diffusers clips float16 at its largest number.
    """
    half, brain = (exports(replace(key, dtype=dtype)).exported.graph for dtype in ("fp16", "bf16"))
    assert nodes(half) == nodes(brain)


@pytest.mark.parametrize(("key", "target"), for_targets())
def test_builds_with_its_collectives_and_fused_attention(
    exports: Exports, build_file: Build, key: Key, target: str
) -> None:
    engine_file = build_file(exports(key).exported.graph.serialized(), target)
    text = read_engine_text(engine_file)
    assert text is not None
    assert text.collectives == key.collectives()
    assert num_ranks_of(engine_file) == key.num_ranks
    assert text.num_fused_attentions == (0 if key.dtype == "fp32" else ATTENTIONS[key.family])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ulysses", "allgather_kv", "hybrid", "tensor"])
@pytest.mark.parametrize("family", ["flux", "wan"])
def test_dynamic_batch_and_sequence(build_file: Build, family: str, strategy: str) -> None:
    """One graph serves two sizes, with one profile over both or one for each."""
    specimen = SPECIMENS[family]
    model, buckets = specimen.model(), specimen.buckets()
    case = export_case(model, buckets[0], ParallelSpec.of(strategy, 4), dynamic=varying_dims(buckets))
    for inputs in buckets:
        whole = reference(model, inputs)
        for prediction in case.predictions(inputs):
            assert relative_error(prediction, whole) <= TOLERANCE["fp32"]
    over_both = (profile_over(case.exported, buckets),)
    one_each = tuple(profile_over(case.exported, (inputs,)) for inputs in buckets)
    for profiles in (over_both, one_each):
        assert build_file(case.exported.graph.serialized(), "sm89", profiles=profiles)


@pytest.mark.slow  # quantized weights are constants in every run
def test_weights_as_constants() -> None:
    specimen = SPECIMENS["flux"]
    model, inputs = specimen.model(), specimen.inputs()
    case = export_case(model, inputs, ParallelSpec.of("allgather_kv", 2), weights_as_inputs=False)
    assert case.exported.graph.weights == ()
    assert relative_error(case.predictions(inputs)[1], reference(model, inputs)) <= TOLERANCE["fp32"]


def test_constants_and_tensor_parallelism_exclude_each_other() -> None:
    specimen = SPECIMENS["flux"]
    with pytest.raises(ValueError, match="they must be inputs"):
        export_case(specimen.model(), specimen.inputs(), ParallelSpec.of("tensor", 2), weights_as_inputs=False)


def test_the_graph_is_the_same_on_every_rank(exports: Exports) -> None:
    """It depends on no rank: exports made as rank 0 and as rank 3 are equal byte for byte."""
    key = Key(family="flux", strategy="ulysses", num_ranks=4, dtype="fp32")
    specimen = SPECIMENS["flux"]
    with offline_team(key.spec, rank=3) as team:
        last = export(specimen.model(), Branch(inputs=specimen.inputs()), team).graph.serialized()
    assert last == exports(key).exported.graph.serialized()


def test_an_exchange_within_a_group_cannot_be_exported() -> None:
    """Ulysses inside tensor parallelism needs two communicators; TensorRT would silently use one."""
    with offline_team(ParallelSpec(ulysses=2, tensor=2)) as team, pytest.raises(Exception, match="ignores groups"):
        export_graph(exchanging(team.context), ("x",), ("y",), num_ranks=4)


def exchanging(axis: Axis) -> GraphModule:
    """Return one exchange, traced as in ``trace``."""

    class Exchange(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return all_to_all(x, axis)

    with torch.no_grad():
        traced = torch.export.export(Exchange(), (torch.zeros(axis.size, 8),), strict=False).module(check_guards=False)
    assert isinstance(traced, GraphModule)
    return traced


@pytest.mark.slow  # the same for a whole model
def test_groups_cannot_be_exported() -> None:
    specimen = SPECIMENS["flux"]
    with pytest.raises(Exception, match="TensorRT ignores groups"):
        export_case(specimen.model(), specimen.inputs(), ParallelSpec(ulysses=2, tensor=2))


@pytest.mark.slow
def test_one_head_per_rank_in_half_precision_is_not_fused(exports: Exports, build_file: Build) -> None:
    """The configuration asks for two heads per rank because bf16 builds with one, silently unfused."""
    specimen = SPECIMENS["flux"]
    model = specimen.model()
    for module in model.modules.values():
        module.to(torch.bfloat16)
    inputs = cast(specimen, specimen.inputs(), torch.bfloat16)
    case = export_case(model, inputs, ParallelSpec.of("ulysses", 8))
    try:
        text = read_engine_text(build_file(case.exported.graph.serialized()))
    except BuildError:
        return
    assert text is not None
    assert text.num_fused_attentions == 0
