"""A ring: engine segments round the torch engine's ring, or TensorRT's own attention over all ranks."""

from __future__ import annotations

import pytest
import torch

from engines.core.model import Branch
from engines.core.spec import ParallelSpec
from engines.tensorrt_engine.build.builder import BuildError
from engines.tensorrt_engine.export.exported import export
from engines.tensorrt_engine.export.trace import offline_team
from tests.engines.tensorrt_engine.conftest import Build, Ring
from tests.engines.tensorrt_engine.support.zoo import SPECIMENS, cast, flux_inputs

RING = ParallelSpec.of("ring", 2)


def test_blocks_of_one_type_share_an_engine_file(build_file: Build, ring: Ring) -> None:
    """Four blocks of Wan: the start, three segments of one kind, the end."""
    _, exported = ring
    assert [segment.kind for segment in exported.segments] == [0, 1, 1, 1, 2]
    assert [segment.attention is None for segment in exported.segments] == [False] * 4 + [True]
    first, second = exported.segments[1].weights, exported.segments[2].weights
    assert list(first) == list(second)
    assert {name.split(".")[1] for name in second.values()} == {"1", "2"}
    assert [graph.collectives() for graph in exported.graphs] == [{}, {}, {"all_gather": 1}]
    for graph in exported.graphs:
        assert build_file(graph.serialized())


def test_ring_does_not_fit_into_one_engine_by_mistake() -> None:
    specimen = SPECIMENS["flux"]
    with offline_team(RING) as team, pytest.raises(Exception, match="export it in segments"):
        export(specimen.model(), Branch(inputs=specimen.inputs()), team)


def test_native_ring_spans_the_ranks_and_is_refused_by_rtx(build_file: Build) -> None:
    specimen = SPECIMENS["flux"]
    model = specimen.model()
    model.modules["transformer"].to(torch.float16)
    inputs = cast(specimen, flux_inputs(1, 8, 8, 16), torch.float16)
    with offline_team(RING) as team:
        graph = export(model, Branch(inputs=inputs), team, ring="native").graph
    attentions = [node for node in graph.model.graph if node.op_type == "Attention"]
    assert [node.attributes["nb_rank"].as_int() for node in attentions] == [2, 2]
    assert {node.domain for node in attentions} == {""}
    with pytest.raises(BuildError, match="RingAttention unsupported"):
        build_file(graph.serialized())


def test_native_ring_refuses_padding() -> None:
    specimen = SPECIMENS["flux"]
    with offline_team(RING) as team, pytest.raises(Exception, match="token numbers that divide"):
        export(specimen.model(), Branch(inputs=specimen.inputs()), team, ring="native")
