"""What the door says of the models behind it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from deployments.config import AppConfig
from deployments.ingress import make_cards, make_enhancers
from pipelines.directory import CLASSIC_INDEX, MODULAR_INDEX, open_modular
from pipelines.loading import SHIPPED
from tests.deployments.support.live import config_of


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
