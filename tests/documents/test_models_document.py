"""docs/reference/models.md and README's table are the output of their program, and agree with the registry."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import pytest

from engines.core.layout import TokenLayout
from engines.core.spec import ParallelSpec
from engines.planner.machine import H200
from engines.planner.profile import profile
from engines.planner.step_cost import StepCost
from pipelines.checkpoint import Checkpoint
from pipelines.loading import published_models
from pipelines.models.registry import FAMILY_FOLDERS, load_spec
from tests.support.fenced import ROOT

DOCUMENT = ROOT / "docs" / "reference" / "models.md"


@pytest.fixture(scope="module")
def program() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / ".ci")
        yield importlib.import_module("models_document")


def test_its_pipelines_are_up_to_date_and_its_models_are_all_there(program: ModuleType) -> None:
    written = DOCUMENT.read_text()
    assert written == program.with_pipelines(written), "run PYTHONPATH=. python .ci/models_document.py"
    _, _, models = written.partition("<!-- published models: ")
    rows = [line for line in models.splitlines() if line.startswith("| ")][2:]
    assert [line.split(" | ")[0].strip("| `") for line in rows] == list(published_models())


@pytest.mark.slow
def test_it_is_up_to_date(program: ModuleType) -> None:
    assert DOCUMENT.read_text() == program.document(DOCUMENT.read_text()), (
        "run PYTHONPATH=. python .ci/models_document.py"
    )


def test_the_table_in_the_readme_is_up_to_date(program: ModuleType) -> None:
    written = (ROOT / "README.md").read_text()
    assert written == program.readme(written), "run PYTHONPATH=. python .ci/models_document.py"


def test_the_readme_promises_of_a_model_what_its_own_row_says(program: ModuleType) -> None:
    """Each model in a shared row is checked: one's ability is no promise of another."""
    rows = [line.strip("| ").split(" | ") for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    said = {cells[0].strip("`"): cells[3] for cells in rows if cells[2] == "—"}
    table = {title: words.partition("; ") for titles, words, _ in program.families() for title in titles.split(", ")}
    for pipeline, words in said.items():
        assert table[program.title_of(pipeline)][0] == (program.NOT_TRIED if words == "—" else words), pipeline
    assert len(said) >= 2
    unseen = {title for title, (words, _, remark) in table.items() if remark == "not seen on a GPU"}
    ran = {title for name in filter(program.ran_on_a_gpu, program.names()) for title in titles(program, name)}
    assert {"Stable Diffusion XL", "Krea 2"} <= ran
    assert not unseen & ran


def titles(program: ModuleType, name: str) -> list[str]:
    """Return a pipeline's names in README's table."""
    family = program.family_of(name)
    return str(program.FAMILIES[family]).split(", ") if family else [program.title_of(name)]


def test_every_known_class_is_in_it() -> None:
    text = DOCUMENT.read_text()
    assert all(f"`{name}`" in text for name in FAMILY_FOLDERS)


def test_every_known_family_has_a_row_in_the_readme(program: ModuleType) -> None:
    assert {load_spec(name).family for name in FAMILY_FOLDERS} == {*program.FAMILIES}


def test_every_published_model_is_a_model_of_its_own_pipeline(program: ModuleType) -> None:
    assert {program.pipeline_of(model) for model in published_models()} <= {*program.names()}
    assert program.pipeline_of("FLUX.1-Kontext-dev") == "FluxKontextModularPipeline"
    assert program.pipeline_of("Wan2.2-T2V-A14B") == "Wan22ModularPipeline"


def test_proofs_are_found_by_what_tests_build(program: ModuleType) -> None:
    found = {pipeline: [str(proof) for proof in proofs] for pipeline, proofs in program.proofs().items()}
    assert "`models/test_gangs.py` (1, 2, 4)" in found["ZImageModularPipeline"]
    layered = ["`models/test_layers.py` (1)", "`models/test_picture_inputs.py` (1, 2, 4)"]
    assert found["QwenImageLayeredModularPipeline"] == layered
    assert found["AnimaModularPipeline"] == ["`models/test_others.py` (1)"]
    assert found["LTX25ModularPipeline"] == ["`models/ltx2/test_ltx25.py` (1, 2)"]
    assert not any("test_start" in file for files in found.values() for file in files), "it compares with nothing"


def test_proofs_say_on_how_many_ranks_and_on_what(program: ModuleType) -> None:
    proofs = importlib.import_module("models_proofs")
    written = """
def test_it(): gang(3).run(work)
def test_without_it(): gang(4).run(work)
def test_refusal():
    with pytest.raises(ValueError): gang(5).run(work)
def test_one_rank(): work()
"""
    assert set(proofs._gangs(ast.parse(written))) == {1, 3}
    values = [(2, "ring"), pytest.param(4, "ring", marks=pytest.mark.slow)]
    assert list(proofs._numbers(pytest.mark.parametrize(("num_ranks", "strategy"), values).mark)) == [2, 4]
    assert list(proofs._numbers(pytest.mark.parametrize("num_ranks", {8: "auto"}).mark)) == [8]
    assert str(proofs.Proof(file="a.py", num_ranks=(1, 2), on_gpu=True)) == "`a.py` (1, 2, GPU)"
    sdxl = program.row("StableDiffusionXLModularPipeline")[-1]
    assert "`models/test_generic.py` (1)" in sdxl, "its plan allows one rank"


def test_what_is_served_is_what_defaults_say(program: ModuleType) -> None:
    served = {name: program.served(program.defaults_of(f"{name}ModularPipeline")) for name in ("Cosmos3Omni", "Wan22")}
    assert served == {
        "Cosmos3Omni": ["text to picture", "text to clip", "picture to clip", "clip to clip", "sound"],
        "Wan22": ["text to clip"],
    }
    assert "inpainting" in program.served(program.defaults_of("QwenImageModularPipeline"))
    assert "layers" in program.served(program.defaults_of("QwenImageLayeredModularPipeline"))
    assert "text to picture" not in program.served(program.defaults_of("QwenImageEditModularPipeline"))
    clips = {name: program.served(program.defaults_of(f"{name}ModularPipeline")) for name in ("LTX", "LTX2")}
    assert ["clip to clip" in words for words in clips.values()] == [False, True]
    own = program.served(program.defaults_of("MiniMaxH3ModularPipeline"))
    assert own == ["text to clip", "picture to clip", "references to clip", "sound"], "with its workflow"


def test_what_is_declared_and_not_served_is_said(program: ModuleType) -> None:
    words = ["text to picture", "text to clip"]
    assert program.beyond(["text2image", "text2video", "image2video"], words) == ["image2video"]
    assert program.beyond(["video2video", "action_policy", "in_context"], words) == [
        "video2video",
        "action_policy",
        "in_context",
    ]
    flows = ["controlnet_text2image", "controlnet_union_text2image", "ip_adapter_controlnet_text2image"]
    assert program.beyond(flows, words) == ["controlnet_…", "controlnet_union_…", "ip_adapter_…"]
    assert program.beyond(["condition"], ["picture to clip"]) == [], "pictures at given frames"
    assert program.beyond(["condition"], words) == ["condition"]
    assert program.beyond(["ref2va"], words) == ["ref2va"]
    assert program.beyond(["ref2va"], ["references to clip"]) == []


@pytest.mark.parametrize(
    ("report", "is_named"),
    [
        ("| FLUX.2-dev, 1024² | 358 | 452 |", True),
        ("# A step of FLUX.2-dev", True),
        ("    python -m benchmarks.model_step FLUX.2-dev --makers ours", True),
        ("    python -m benchmarks.decode FLUX.2-dev", False),
        ("| FLUX.2-dev-turbo | 358 |", False),
        ("| MyFLUX.2-dev | 358 |", False),
        ("| a step | as FLUX.2-dev |", False),
        ("FLUX.2-dev was not measured.", False),
    ],
)
def test_a_report_times_what_its_tables_title_or_commands_name(
    program: ModuleType, report: str, is_named: bool
) -> None:
    assert importlib.import_module("models_facts").names(report, "FLUX.2-dev") is is_named


def test_models_that_were_timed_link_to_reports(program: ModuleType) -> None:
    timed = importlib.import_module("models_facts").timed
    assert "model_step_h200_" in timed("Wan2.2-I2V-A14B")
    assert "denoise_step_h200_" in timed("Wan2.1-T2V-14B"), "reports name it Wan2.1-14B"
    assert timed("Helios-Base") == ""


def test_a_model_whose_heads_alone_are_divided_is_not_called_one_rank(program: ModuleType) -> None:
    plan = load_spec("FluxTransformer2DModel").shard_plan({})
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
    assert program.licence_of("Helios-Base") == "Apache-2.0"
    assert program.licence_of("LTX-Video") == "LTXV Open Weights License"
    assert program.licence_of("LTX-2") == "LTX-2 Community License"
    assert program.licence_of("nobody-knows") == "see its page"
