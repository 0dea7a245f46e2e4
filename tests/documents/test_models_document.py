"""docs/models.md and README's table are what their program writes, and say what the registry knows."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import pytest

from engines.core.layout import TokenLayout
from engines.core.spec import ParallelSpec
from engines.planner.machines import H200
from engines.planner.profile import profile
from engines.planner.step_cost import StepCost
from pipelines.checkpoint import Checkpoint
from pipelines.loading import published_models
from pipelines.models.registry import ARCHITECTURES, load_architecture
from tests.support.fenced import ROOT

DOCUMENT = ROOT / "docs" / "models.md"


@pytest.fixture(scope="module")
def program() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / ".ci")
        yield importlib.import_module("models_document")


def test_its_pipelines_are_up_to_date_and_its_models_are_all_there(program: ModuleType) -> None:
    written, pipelines = DOCUMENT.read_text(), program.pipelines_text()
    assert written.startswith(pipelines), "run PYTHONPATH=. python .ci/models_document.py"
    models = written.removeprefix(pipelines).splitlines()[2:]
    assert [line.split(" | ")[0].strip("| `") for line in models] == list(published_models())


@pytest.mark.slow
def test_it_is_up_to_date(program: ModuleType) -> None:
    assert DOCUMENT.read_text() == program.text(), "run PYTHONPATH=. python .ci/models_document.py"


def test_the_table_in_the_readme_is_up_to_date(program: ModuleType) -> None:
    written = (ROOT / "README.md").read_text()
    assert written == program.readme(written), "run PYTHONPATH=. python .ci/models_document.py"


def test_every_known_class_is_in_it() -> None:
    text = DOCUMENT.read_text()
    assert all(f"`{name}`" in text for name in ARCHITECTURES)


def test_every_known_family_has_a_row_in_the_readme(program: ModuleType) -> None:
    assert {load_architecture(name).family for name in ARCHITECTURES} == {*program.FAMILIES}


def test_every_published_model_is_a_model_of_its_own_pipeline(program: ModuleType) -> None:
    assert {program.pipeline_of(model) for model in published_models()} <= {*program.names()}
    assert program.pipeline_of("FLUX.1-Kontext-dev") == "FluxKontextModularPipeline"
    assert program.pipeline_of("Wan2.2-T2V-A14B") == "Wan22ModularPipeline"


def test_proofs_are_found_by_what_tests_build(program: ModuleType) -> None:
    found = program.proofs()
    assert "`models/test_gangs.py`" in found["ZImageModularPipeline"]
    layered = ("`models/pictures/test_layers.py`", "`models/pictures/test_picture_inputs.py`")
    assert found["QwenImageLayeredModularPipeline"] == layered
    assert "AnimaModularPipeline" not in found
    assert not any("test_start" in file for files in found.values() for file in files), "it compares with nothing"


def test_a_model_whose_heads_alone_are_divided_is_not_called_one_rank(program: ModuleType) -> None:
    plan = load_architecture("FluxTransformer2DModel").shard_plan({})
    assert program.ways(plan)[:3] == ("ulysses", "ring", "allgather_kv")
    assert program.ways(replace(plan, shards=(), carried=())) == ("guidance", "tensor")
    assert program.ways(replace(plan, shards=(), linears=(), carried=())) == ("one rank",)


@pytest.mark.parametrize("name", ["FLUX.1-dev", "Wan2.2-T2V-A14B"])
def test_memory_is_what_the_cost_model_counts(program: ModuleType, name: str) -> None:
    counted = profile(Checkpoint.of_configuration(name, "cpu", "bfloat16").weightless())
    layout = TokenLayout(lengths=(("video", 1),), num_chunks=1)
    specs = [ParallelSpec(), *(ParallelSpec(**{axis: n}) for axis in ("tensor", "pipeline") for n in (2, 4))]
    weights = [StepCost(counted, layout, spec, H200, "native").weight_bytes() / 2**30 for spec in specs]
    _, shares = program.counted(name)
    assert [float(share) for share in shares] == pytest.approx(weights, abs=0.2)


def test_it_warns_of_licences_and_names_them(program: ModuleType) -> None:
    assert "Licences differ" in DOCUMENT.read_text()
    assert program.licence_of("FLUX.1-schnell") == "Apache-2.0"
    assert program.licence_of("Qwen-Image-2.1") != program.licence_of("Qwen-Image")
    assert program.licence_of("nobody-knows") == "see its page"
