"""The ingress describes the models behind it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from deployments.config import AppConfig
from deployments.ingress import make_cards, make_enhancers
from pipelines.directory import CLASSIC_INDEX, MODULAR_INDEX, open_modular
from pipelines.loading import SHIPPED
from tests.deployments.support.live import asked_for, config_of, footprint, live, picture, wait_until


@pytest.mark.parametrize("layout", [CLASSIC_INDEX, MODULAR_INDEX])
def test_a_model_is_as_old_as_its_folder(layout: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(SHIPPED / "flux-shapes", tmp_path / "m"))
    if layout == MODULAR_INDEX:
        open_modular(folder).save_config(str(folder))
        os.utime(folder / CLASSIC_INDEX, (10, 10))
    os.utime(folder / layout, (1_763_690_000, 1_763_690_000))
    assert make_cards(config_of({"m": folder}).app)["m"].created == 1_763_690_000


def test_a_model_has_its_own_prompt_enhancer_or_that_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    all_of, own = {"url": "http://a/v1", "model": "m"}, {"url": "http://b/v1", "model": "n", "api_key_variable": "MINE"}
    models = [{"name": "flux-shapes"}, {"name": "wan-shapes", "prompt_enhancer": {**own, "default": True}}]
    config = AppConfig.model_validate({"models": models, "api": {"prompt_enhancer": all_of}})
    assert {name: one.url for name, one in config.prompt_enhancers.items()} == {
        "flux-shapes": "http://a/v1",
        "wan-shapes": "http://b/v1",
    }
    assert [card.enhances_prompts for card in make_cards(config).values()] == [False, True]
    assert make_cards(AppConfig.model_validate({"models": models[:1]}))["flux-shapes"].enhances_prompts is None
    monkeypatch.delenv("MINE", raising=False)
    with pytest.raises(ValueError, match="MINE is not set"):
        make_enhancers(config)
    monkeypatch.setenv("MINE", " secret\n")
    assert make_enhancers(config).keys == {"MINE": "secret"}


@pytest.mark.slow
def test_replicas_of_the_api_come_with_requests_and_go(ray_cluster: None) -> None:
    scaling: dict[str, float] = {"max_replicas": 2, "target_ongoing_requests": 2, "look_back_period_s": 2}
    scaling |= {"upscale_delay_s": 0.5, "downscale_delay_s": 2}
    config = config_of({"flux-shapes": SHIPPED / "flux-shapes"}, api={"autoscaling": scaling})
    with live(config) as url:
        made = [picture(url, seed=seed) for seed in range(6)]
        assert footprint()["Ingress"] == 1
        with asked_for(url, made, num_clients=len(made)):
            wait_until(lambda: footprint()["Ingress"] == 2, "another replica")
        with asked_for(url, made[:1]):
            wait_until(lambda: footprint()["Ingress"] == 1, "one client needs one, and loses no request")
