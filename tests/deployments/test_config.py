"""Each shipped config file is valid for Ray Serve and for Troupe, and errors name what is wrong."""

from __future__ import annotations

import copy
import itertools
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from ray import serve
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary

from deployments.app import build_app
from deployments.cli.cluster import num_logical_cpus
from deployments.cli.serving import READY_DEADLINE_S, load_config, parse_config, ready_deadline_s
from deployments.config import CONFIGS, AppConfig, ServeConfig
from deployments.model_config import ModelConfig
from deployments.stages.stage_config import DenoiserConfig, StageConfig
from engines.core.spec import PRECISIONS, is_static
from engines.gang.gang_config import GangConfig
from engines.registry import ENGINES


def laptop() -> dict[str, Any]:
    """Return the document without the recipe, whose adapter not every engine takes."""
    document: dict[str, Any] = yaml.safe_load((CONFIGS / "laptop.yaml").read_text())
    del document["applications"][0]["args"]["models"][0]["recipes"]
    return document


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_shipped_configs_are_valid_down_to_the_gang(name: str) -> None:
    for model in load_config(name).app.models:
        assert isinstance(model.denoiser, GangConfig)
        assert model.denoiser.engine in ENGINES


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_serve_deploy_checks_the_arguments_of_shipped_configs_and_builds_the_application(name: str) -> None:
    builder: Any = build_app
    args = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())["applications"][0]["args"]
    assert isinstance(call_user_app_builder_with_args_if_necessary(builder, args), serve.Application)
    with pytest.raises(ValidationError, match="no_such_key"):
        call_user_app_builder_with_args_if_necessary(builder, {**args, "no_such_key": 1})


def test_there_is_a_config_for_the_laptop_and_for_1_2_4_and_8_gpus() -> None:
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == {"laptop", "gpu1", "gpu2", "gpu4", "gpu8"}
    for num_ranks in (1, 2, 4, 8):
        assert {model.denoiser.num_ranks for model in load_config(f"gpu{num_ranks}").app.models} == {num_ranks}


ARGS = ("applications", 0, "args")
MODEL = (*ARGS, "models", 0)


@pytest.mark.parametrize(
    "path",
    [
        ("http_options",),
        ARGS,
        (*ARGS, "api"),
        MODEL,
        (*MODEL, "text_encoder"),
        (*MODEL, "decoder"),
        (*MODEL, "denoiser"),
        (*MODEL, "denoiser", "autoscaling"),
        (*MODEL, "denoiser", "nccl"),
        (*MODEL, "denoiser", "torch"),
        (*MODEL, "denoiser", "tensorrt"),
    ],
    ids=lambda path: str(path[-1]),
)
def test_unknown_keys_are_errors_that_say_where_they_are(path: tuple[Any, ...]) -> None:
    document = laptop()
    target: Any = document
    for key in path:
        target = target.setdefault(key, {}) if isinstance(target, dict) else target[key]
    target["num_rankz"] = 2
    told = [*path[3:], "num_rankz"] if path[:3] == ARGS else [*path, "num_rankz"]
    where = ".".join("flux-shapes" if part == 0 else str(part) for part in told)
    with pytest.raises(ValueError, match=f"^{where} is no key here: ") as caught:
        parse_config(document)
    assert isinstance(caught.value.__cause__, ValidationError)


def test_a_key_of_the_application_is_no_key_of_a_file() -> None:
    for path in ((), ("applications", 0)):
        document = copy.deepcopy(laptop())
        target: Any = document
        for key in path:
            target = target[key]
        target["num_rankz"] = 2
        with pytest.raises(ValueError, match="num_rankz is no key here"):
            parse_config(document)


def test_models_need_different_names() -> None:
    with pytest.raises(ValidationError, match="must differ"):
        AppConfig.model_validate({"models": [{"name": "flux-shapes"}, {"name": "flux-shapes"}]})


def test_a_control_network_is_part_of_a_models_source() -> None:
    model = {"name": "a", "path": "x.safetensors", "base": "owner/model", "controlnet": "owner/network"}
    assert ModelConfig.model_validate(model).source == "x.safetensors@owner/model+controlnet@owner/network"
    of_references = ModelConfig(name="a", path="owner/model", workflow="ref2va")
    assert of_references.source == "owner/model+workflow@ref2va"
    assert ModelConfig.model_validate({"name": "a"}).source == "a"


def test_stages_together_are_one_deployment_and_have_one_section() -> None:
    (model,) = AppConfig.model_validate({"models": [{"name": "m", "stages": "together"}]}).models
    shared = [field.name for field in fields(StageConfig)]
    assert [getattr(model.text_encoder, name) for name in shared] == [getattr(model.decoder, name) for name in shared]
    with pytest.raises(ValidationError, match="the section decoder has no effect with stages: together"):
        AppConfig.model_validate({"models": [{"name": "m", "stages": "together", "decoder": {"num_threads": 2}}]})


def test_autoscaling_bounds_are_ordered() -> None:
    bounds = {"min_replicas": 3, "max_replicas": 2}
    with pytest.raises(ValidationError, match="max_replicas 2 is below min_replicas 3"):
        AppConfig.model_validate({"models": [{"name": "m", "denoiser": {"autoscaling": bounds}}]})


@pytest.mark.parametrize(
    ("scaling", "reason"),
    [
        ({"idle_s": 60}, "idle_s has no effect without target_wait_s"),
        ({"priority": 2}, "priority has no effect without target_wait_s"),
        ({"gangs_per_node": 2}, "gangs_per_node has no effect without target_wait_s"),
        (
            {"target_wait_s": 5, "target_ongoing_requests": 3},
            "target_ongoing_requests has no effect beside target_wait_s",
        ),
        ({"target_wait_s": 5, "downscale_delay_s": 3}, "downscale_delay_s has no effect beside target_wait_s"),
        ({"target_wait_s": 0}, "greater than 0"),
        ({"target_wait_s": 5, "priority": 0}, "greater than 0"),
    ],
)
def test_gangs_scale_by_work_or_by_requests(scaling: dict[str, float], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        AppConfig.model_validate({"models": [{"name": "m", "denoiser": {"autoscaling": scaling}}]})


@pytest.mark.parametrize(
    ("api", "reason"),
    [
        (
            {"autoscaling": {"min_replicas": 0, "max_replicas": 2}},
            "api.autoscaling.min_replicas is 0; it must be at least 1",
        ),
        (
            {"autoscaling": {"max_replicas": 2}, "num_replicas": 2},
            "num_replicas 2 has no effect beside autoscaling",
        ),
        ({"autoscaling": {"target_wait_s": 5}}, "target_wait_s"),
    ],
)
def test_replicas_of_the_api_scale_by_requests_and_never_to_none(api: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        AppConfig.model_validate({"models": [{"name": "m"}], "api": api})


def test_encoders_do_not_scale_by_predicted_work() -> None:
    with pytest.raises(ValidationError, match="target_wait_s"):
        AppConfig.model_validate({"models": [{"name": "m", "text_encoder": {"autoscaling": {"target_wait_s": 5}}}]})


def test_scaling_by_work_survives_a_copy_of_the_document() -> None:
    more = {"autoscaling": {"target_wait_s": 5, "min_replicas": 0, "max_replicas": 3}}
    config = parse_config(document_with(("models", 0, "denoiser"), more))
    assert config.with_http(port=0).app.models[0].denoiser.autoscaling == config.app.models[0].denoiser.autoscaling


def test_ranks_of_all_models_cover_their_minimum() -> None:
    gang = {"num_ranks": 2, "autoscaling": {"target_wait_s": 5, "min_replicas": 2, "max_replicas": 3}}
    models = [{"name": name, "denoiser": gang} for name in "ab"]
    AppConfig.model_validate({"models": models, "max_ranks": 8})
    with pytest.raises(ValidationError, match="max_ranks is 7, and the min_replicas of all models need 8 ranks"):
        AppConfig.model_validate({"models": models, "max_ranks": 7})


def test_an_unknown_config_lists_the_shipped_ones() -> None:
    with pytest.raises(ValueError, match=r"gpu1, gpu2, gpu4, gpu8, laptop"):
        load_config("desktop")


def test_local_cluster_has_room_for_all_that_the_config_asks_for() -> None:
    config = load_config("gpu8")
    denoiser = config.app.models[0].denoiser
    assert num_logical_cpus(config) > denoiser.num_ranks * denoiser.cpus_per_rank


@pytest.mark.parametrize(
    ("where", "more"),
    [
        (("api",), {"num_replicas": 41, "num_cpus": 1}),
        (("models", 0, "denoiser"), {"autoscaling": {"max_replicas": 40}, "num_ranks": 2, "cpus_per_rank": 0.5}),
        (("models", 0, "text_encoder"), {"autoscaling": {"max_replicas": 40}, "num_cpus": 1}),
        (("models", 0), {"stages": "apart", "decoder": {"num_replicas": 40, "num_cpus": 1}}),
    ],
)
def test_local_cluster_has_room_for_every_replica_that_may_come(where: tuple[Any, ...], more: dict[str, Any]) -> None:
    assert num_logical_cpus(parse_config(laptop())) < 40
    assert num_logical_cpus(parse_config(document_with(where, more))) >= 40


def document_with(where: tuple[Any, ...], more: dict[str, Any]) -> dict[str, Any]:
    """Return the laptop's document with ``more`` in one section of the application's arguments."""
    document = laptop()
    target: Any = document["applications"][0]["args"]
    for key in where:
        target = target.setdefault(key, {}) if isinstance(target, dict) else target[key]
    target.update(more)
    return document


@pytest.mark.parametrize("stage", ["text_encoder", "denoiser", "decoder"])
def test_a_number_of_replicas_beside_autoscaling_is_refused(stage: str) -> None:
    both = {"num_replicas": 2, "autoscaling": {"max_replicas": 3}}
    with pytest.raises(ValueError, match="num_replicas 2 has no effect beside autoscaling"):
        parse_config(document_with(("models", 0, stage), both))


@pytest.mark.parametrize(
    ("denoiser", "message"),
    [
        ({"strategy": "ulises"}, "unknown strategy 'ulises'; known: ulysses"),
        ({"strategy": "guidance", "num_ranks": 3}, "needs a multiple of 2 ranks, not 3"),
        ({"attention": "fp4"}, "attention is 'fp4'; it must be auto or fp8"),
        ({"precision": "fp9"}, "precision is 'fp9'; the torch engine knows auto, native, fp8, fp8-static, int8"),
        ({"num_ranks": 0}, "num_ranks is 0; it must be at least 1"),
        ({"engine": "jax"}, "unknown engine 'jax'; known: torch, tensorrt"),
        ({"warm_sizes": ["large"]}, "warm_sizes"),
        ({"gpus_per_rank": 0.3}, "gpus_per_rank is 0.3; it must be 0, or above 0.5"),
        ({"num_nodes": 3}, "num_nodes is 3; it must be a divisor of num_ranks=2"),
        ({"nccl": {"max_ctas": 99}}, "max_ctas is 99; it must be 1 to 64"),
    ],
)
def test_what_no_gang_can_do_is_told_before_anything_starts(denoiser: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_config(document_with(("models", 0, "denoiser"), denoiser))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_of_the_engine_may_be_configured(precision: str) -> None:
    section = {"torch": {"calibration": "scales.json"}} if is_static(precision) else {}
    config = parse_config(document_with(("models", 0, "denoiser"), {"precision": precision, **section}))
    assert config.app.models[0].denoiser.precision == precision


@pytest.mark.parametrize(("engine", "other"), list(itertools.permutations(ENGINES, 2)))
def test_a_section_of_another_engine_is_refused(engine: str, other: str) -> None:
    """This includes empty sections: their settings would have no effect."""
    chosen = {"engine": engine, "gpus_per_rank": 1}
    parse_config(document_with(("models", 0, "denoiser"), {**chosen, engine: {}}))
    with pytest.raises(ValueError, match=f"the section {other} is for engine: {other} alone"):
        parse_config(document_with(("models", 0, "denoiser"), {**chosen, other: {}}))


def sharing(**second: Any) -> ServeConfig:
    document = laptop()
    models = document["applications"][0]["args"]["models"]
    models[0]["share"] = models[1]["share"] = "cores"
    for section, keys in second.items():
        models[1] |= {section: models[1].get(section, {}) | keys if isinstance(keys, dict) else keys}
    return parse_config(document)


@pytest.mark.parametrize(
    ("second", "told"),
    [
        ({"share": "other"}, "share: (cores|other) is said by [a-z-]+ alone: give it to another model too"),
        ({"denoiser": {"num_replicas": 2}}, "denoiser has one replica without autoscaling where models share GPUs"),
        ({"text_encoder": {"autoscaling": {}}}, "text_encoder has one replica without autoscaling"),
        ({"denoiser": {"gpus_per_rank": 1}}, "need the same gpus_per_rank; share: cores has [a-z-]+ 0, [a-z-]+ 1"),
        ({"denoiser": {"num_nodes": 2}}, "are on one node: remove num_nodes"),
        ({"denoiser": {"engine": "tensorrt", "gpus_per_rank": 1}}, "need engine: torch, whose weights can sleep"),
    ],
)
def test_models_that_cannot_share_gpus_are_told(second: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        sharing(**second)


def test_limits_of_a_group_need_its_models() -> None:
    assert [model.name for model in sharing().app.sharing("cores")] == ["flux-shapes", "wan-shapes"]
    with pytest.raises(ValueError, match="shares has cores, which no model shares"):
        parse_config(document_with(("shares",), {"cores": {"memory_gib": 1}}))


def test_every_engine_has_a_section_of_its_own_options() -> None:
    for name, row in ENGINES.items():
        given = parse_config(document_with(("models", 0, "denoiser"), {"engine": name, "gpus_per_rank": 1, name: {}}))
        options = given.app.models[0].denoiser.engine_options
        assert f"{type(options).__module__}:{type(options).__name__}" == row.options


def test_what_python_makes_is_checked_as_what_yaml_says() -> None:
    with pytest.raises(ValidationError, match="num_rankz"):
        DenoiserConfig(num_rankz=2)  # type: ignore[call-arg]
    with pytest.raises(ValidationError, match="valid integer"):
        DenoiserConfig(num_ranks="many")  # type: ignore[arg-type]


def test_a_checked_configuration_stays_as_it_is() -> None:
    denoiser = load_config("gpu2").app.models[0].denoiser
    with pytest.raises(FrozenInstanceError):
        denoiser.num_ranks = 3  # type: ignore[misc]
    config = load_config("gpu2")
    other = config.with_http(port=0).with_data_dir(Path("elsewhere"))
    assert other.app.models == config.app.models
    assert other.app.api.data_dir == Path("elsewhere")


def test_a_server_is_waited_for_as_long_as_its_gangs_may_take() -> None:
    assert ready_deadline_s(parse_config(laptop())) == READY_DEADLINE_S
    slow = parse_config(document_with(("models", 1, "denoiser"), {"start_deadline_s": 5000}))
    assert ready_deadline_s(slow) > 5000
    assert ready_deadline_s(sharing(denoiser={"start_deadline_s": 5000})) > 5000 + 600, "one after the other"


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "expected"),
    [("auto", 4, 1), ("ulysses", 4, 1), ("pipeline", 4, 4), ("pipeline2xulysses2", 4, 2), ("pipeline", 1, 1)],
)
def test_as_many_jobs_advance_together_as_a_pipeline_has_stages(strategy: str, num_ranks: int, expected: int) -> None:
    assert DenoiserConfig(strategy=strategy, num_ranks=num_ranks).max_batch == expected
