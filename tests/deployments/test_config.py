"""Config files: each shipped one is valid for Ray Serve and for us; what is wrong is named."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from deployments.config import AppConfig
from deployments.serving import CONFIGS, load_config, num_logical_cpus, parse_config
from engines.gang.config import GangConfig


def laptop() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((CONFIGS / "laptop.yaml").read_text())
    return document


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_shipped_configs_are_valid_down_to_the_gang(name: str) -> None:
    from deployments.denoiser import gang_config

    for model in load_config(name).app.models:
        gang = gang_config(model)
        assert isinstance(gang, GangConfig)
        assert gang.num_ranks == model.denoiser.num_ranks


def test_there_is_a_config_for_the_laptop_and_for_1_2_4_and_8_gpus() -> None:
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == {"laptop", "gpu1", "gpu2", "gpu4", "gpu8"}
    for width in (1, 2, 4, 8):
        assert {model.denoiser.num_ranks for model in load_config(f"gpu{width}").app.models} == {width}


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
