"""``TensorRTEngine`` on Gloo ranks has teams, guidance pairs and one engine per shape. onnxruntime runs the graphs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch

from engines.core.model import Branch, DenoiserModel
from engines.core.spec import ParallelSpec
from engines.parallel.division import Division, TeamSpecs
from engines.parallel.local_attention import plain_attention
from engines.parallel.mesh import Groups, Team
from engines.tensorrt_engine import engine as engine_module
from engines.tensorrt_engine.engine import TensorRTEngine
from engines.tensorrt_engine.export.exported import EngineExport
from engines.tensorrt_engine.export.exporter import Exporter
from tests.engines.support.gloo import gang
from tests.engines.tensorrt_engine.support.all_ranks import relative_error
from tests.engines.tensorrt_engine.support.gloo_runner import (
    SIZES,
    GlooRunner,
    alike_error,
    predict_on_team,
    predict_sizes,
    same_engine_file_error,
)
from tests.engines.tensorrt_engine.support.zoo import SPECIMENS, flux_inputs, reference


@pytest.mark.parametrize(
    ("family", "strategy", "num_engines"),
    [
        pytest.param("flux", "ulysses", 1, marks=pytest.mark.slow),
        pytest.param("wan", "guidance", 1, marks=pytest.mark.slow),
        ("flux", "ring", 3),  # start, dual to single, end
        pytest.param("wan", "ring", 3, marks=pytest.mark.slow),
        pytest.param("flux", "tensor", 1, marks=pytest.mark.slow),
    ],
)
def test_both_ranks_predict_what_one_device_does(tmp_path: Path, family: str, strategy: str, num_engines: int) -> None:
    model = SPECIMENS[family].model()
    (module,) = model.modules.values()
    model.set_kernel(module, plain_attention)
    with torch.no_grad():
        expected = [model.forward(module, branch.inputs) for branch in model.probe()]
    for predictions, made in gang(2).run(predict_on_team, tmp_path, family, strategy, (0, 1)):
        assert made == num_engines  # two branches, two steps, one shape
        assert len(predictions) == 4
        for prediction, whole in zip(predictions, expected * 2, strict=True):
            assert relative_error(prediction, whole) <= 1e-4


def test_sizes_that_are_expected_share_an_engine_with_those_between(tmp_path: Path) -> None:
    model, sizes = SPECIMENS["flux"].model(), tuple(SIZES)
    expected = [reference(model, flux_inputs(1, *SIZES[name])) for name in sizes]
    for predictions, graphs, num_exports in gang(2).run(predict_sizes, tmp_path, sizes):
        for prediction, whole in zip(predictions, expected, strict=True):
            assert relative_error(prediction, whole) <= 1e-4
        assert len(graphs) == 4, "each size has a context of its own"
        assert [graph == graphs[0] for graph in graphs] == [True, True, True, False]
        assert num_exports == 2, "each made by one rank for both"


def alone(model: DenoiserModel) -> Division:
    specs = TeamSpecs(by_size={1: (ParallelSpec(),)})
    return Division(specs, model.plan, rank=0, num_ranks=1, groups=Groups(num_ranks=1))


class ExportSize(Exception):
    """Carries the number of branches of an export."""


class AskedExporter(Exporter):
    def export(self, branches: Sequence[Branch], team: Team) -> EngineExport:
        raise ExportSize(len(branches))


@pytest.mark.parametrize(("constants", "num_together"), [({}, 2), ({"grid": (1, 4)}, 1)])
def test_sizes_with_constants_of_their_own_share_no_engine(constants: dict[str, object], num_together: int) -> None:
    """An engine contains the constants of one size, so no other size could use it."""
    model = SPECIMENS["flux"].model()
    sizes = (SIZES["likely"], SIZES["other"])
    engine = TensorRTEngine(
        model,
        division=alone(model),
        make_runner=GlooRunner,
        exporter=AskedExporter(model=model),
        buckets=[Branch(inputs=flux_inputs(1, *size), constants=constants) for size in sizes],
    )
    with pytest.raises(ExportSize) as asked:
        engine.prepare()
    assert asked.value.args == (num_together,)


def test_contexts_of_shapes_that_came_longest_ago_go() -> None:
    model = SPECIMENS["flux"].model()
    engine = TensorRTEngine(model, division=alone(model), make_runner=GlooRunner, exporter=Mock(), capture=False)
    closed = Mock()

    def make(_exported: EngineExport, _model: object, branch: Branch, *_: object) -> Mock:
        return Mock(side_effect=lambda inputs: inputs["hidden_states"], close=lambda: closed(branch))

    one, two, three = (Branch(inputs=flux_inputs(1, *size)) for size in ((16, 2, 2), (16, 4, 2), (16, 4, 4)))
    warm = []
    with patch.object(engine_module, "MAX_SHAPES", 2), patch.object(engine_module, "make_step", make):
        for branch in (one, two, one, three, one, two):
            engine.predict((branch,), (0,))
            warm.append(engine.was_warm)
    assert warm == [False, False, True, False, True, False]
    assert [call.args[0] for call in closed.call_args_list] == [two, three]
    engine.close()
    assert closed.call_count == 4


def test_a_rank_that_is_not_like_the_others_is_named_on_every_rank() -> None:
    same = {"TensorRT": "tensorrt 11.2", "weights of transformer": "ab"}
    assert gang(2).run(alike_error, [same, same]) == ["", ""]
    for message in gang(2).run(alike_error, [same, same | {"TensorRT": "tensorrt 11.0"}]):
        assert message == (
            "rank 1: its TensorRT is not that of the rest of the gang: "
            "found tensorrt 11.0, expected tensorrt 11.2 (rank 0's)"
        )


def test_a_rank_with_another_engine_file_is_named_on_every_rank() -> None:
    assert gang(2).run(same_engine_file_error, ["aa", "aa"]) == ["", ""]
    for message in gang(2).run(same_engine_file_error, ["aa", "bb"]):
        assert (
            message == "rank 1: its engine file is not that of the rest of its team: found bb, expected aa (rank 0's)"
        )
