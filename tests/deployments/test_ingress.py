"""What the door says of the models behind it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from deployments.ingress import make_cards
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
