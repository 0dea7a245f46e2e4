"""Config files: each shipped one is valid for Ray Serve and for us; what is wrong is named."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from deployments.cli.serving import (
    CONFIGS,
    READY_DEADLINE_S,
    load_config,
    num_logical_cpus,
    parse_config,
    ready_deadline_s,
)
from deployments.config import AppConfig
from engines.core.precision import PRECISIONS
from engines.gang.config import GangConfig
from engines.torch_engine.config import TorchEngineConfig


def laptop() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((CONFIGS / "laptop.yaml").read_text())
    return document


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_shipped_configs_are_valid_down_to_the_gang(name: str) -> None:
    from deployments.stages.denoiser import gang_config

    for model in load_config(name).app.models:
        gang = gang_config(model)
        assert isinstance(gang, GangConfig)
        assert gang.num_ranks == model.denoiser.num_ranks


def test_there_is_a_config_for_the_laptop_and_for_1_2_4_and_8_gpus() -> None:
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == {"laptop", "gpu1", "gpu2", "gpu4", "gpu8"}
    for num_ranks in (1, 2, 4, 8):
        assert {model.denoiser.num_ranks for model in load_config(f"gpu{num_ranks}").app.models} == {num_ranks}


@pytest.mark.parametrize(
    "path",
    [
        ("applications", 0, "args"),
        ("applications", 0, "args", "models", 0),
        ("applications", 0, "args", "models", 0, "denoiser"),
        ("http_options",),
    ],
)
def test_unknown_keys_are_errors_that_name_the_key(path: tuple[Any, ...]) -> None:
    document = copy.deepcopy(laptop())
    target: Any = document
    for key in path:
        target = target[key]
    target["num_rankz"] = 2
    with pytest.raises(ValidationError, match="num_rankz"):
        parse_config(document)


def test_models_need_different_names() -> None:
    with pytest.raises(ValidationError, match="must differ"):
        AppConfig.model_validate({"models": [{"name": "flux-shapes"}, {"name": "flux-shapes"}]})


def test_autoscaling_bounds_are_ordered() -> None:
    bounds = {"min_replicas": 3, "max_replicas": 2}
    with pytest.raises(ValidationError, match="max_replicas 2 is below min_replicas 3"):
        AppConfig.model_validate({"models": [{"name": "m", "denoiser": {"autoscaling": bounds}}]})


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
        (("models", 0, "decoder"), {"num_replicas": 40, "num_cpus": 1}),
    ],
)
def test_local_cluster_has_room_for_every_replica_that_may_come(where: tuple[Any, ...], more: dict[str, Any]) -> None:
    assert num_logical_cpus(parse_config(laptop())) < 40
    assert num_logical_cpus(parse_config(changed(where, more))) >= 40


def changed(where: tuple[Any, ...], more: dict[str, Any]) -> dict[str, Any]:
    """The laptop's document with ``more`` in one section of the application's arguments."""
    document = laptop()
    target: Any = document["applications"][0]["args"]
    for key in where:
        target = target.setdefault(key, {}) if isinstance(target, dict) else target[key]
    target.update(more)
    return document


@pytest.mark.parametrize("stage", ["text_encoder", "denoiser", "decoder"])
def test_a_number_of_replicas_beside_autoscaling_is_refused(stage: str) -> None:
    both = {"num_replicas": 2, "autoscaling": {"max_replicas": 3}}
    with pytest.raises(ValidationError, match="num_replicas 2 has no effect beside autoscaling"):
        parse_config(changed(("models", 0, stage), both))


@pytest.mark.parametrize(
    ("denoiser", "message"),
    [
        ({"strategy": "ulises"}, "unknown strategy 'ulises'; known: ulysses"),
        ({"strategy": "guidance", "num_ranks": 3}, "needs a multiple of 2 ranks, not 3"),
        ({"precision": "fp9"}, "precision is 'fp9'; engine torch knows auto, native, fp8, fp8-static, int8"),
        ({"gpus_per_rank": 0.3}, "gpus_per_rank is 0.3; it must be 0, or above 0.5"),
        ({"num_nodes": 3}, "num_nodes is 3; it must be a divisor of num_ranks=2"),
        ({"nccl": {"max_ctas": 99}}, "max_ctas is 99; it must be 1 to 64"),
    ],
)
def test_what_no_gang_can_do_is_told_before_anything_starts(denoiser: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_config(changed(("models", 0, "denoiser"), denoiser))


def test_precisions_are_those_of_the_engine() -> None:
    for precision in PRECISIONS:
        TorchEngineConfig(precision=precision, calibration=Path("scales") if precision == "fp8-static" else None)
    with pytest.raises(ValueError, match=f"the torch engine knows {', '.join(PRECISIONS)}$"):
        TorchEngineConfig(precision="fp9")


def test_a_server_is_waited_for_as_long_as_its_gangs_may_take() -> None:
    assert ready_deadline_s(parse_config(laptop())) == READY_DEADLINE_S
    slow = parse_config(changed(("models", 1, "denoiser"), {"start_deadline_s": 5000}))
    assert ready_deadline_s(slow) > 5000
