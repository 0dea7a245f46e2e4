"""Commands that start the application leave only the requested files, at their end or after Ctrl-C."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from tests.deployments.support.commands import command, config_file, short_folder
from tests.deployments.support.live import config_of

pytestmark = pytest.mark.ray

MOMENTS = {"at once": ("Starting Ray Serve", None), "replicas start": (r"0:00:0[4-9]", 0.3)}


@pytest.mark.parametrize("moment", [pytest.param("at once", marks=pytest.mark.slow), "replicas start"])
def test_ctrl_c_leaves_no_process_and_no_file(pictures: Path, moment: str) -> None:
    pattern, again_after_s = MOMENTS[moment]
    with short_folder() as folder:
        config, out = config_file(config_of({"pictures": pictures}), folder), folder / "picture.png"
        wanted = ("--steps", "100", "--out", str(out), "--config", config)
        with command("generate", "a red circle", *wanted, folder=folder) as generate:
            generate.wait_for(pattern)
            code = generate.interrupt(again_after_s=again_after_s)
            assert code == 130, generate.output
            assert "Traceback" not in generate.output
        assert not out.exists()


@pytest.mark.slow
def test_ctrl_c_in_the_demo_leaves_no_process_and_no_half_clip() -> None:
    with short_folder() as folder, command("demo", "--out", str(folder / "out"), folder=folder) as demo:
        demo.wait_for(r"step\s+[1-9]\d? of \d+")
        assert demo.interrupt() == 130, demo.output
        assert "Traceback" not in demo.output
        assert not (folder / "out" / "clip.mp4").exists()


@pytest.mark.slow
def test_generate_from_start_to_end(pictures: Path) -> None:
    with short_folder() as folder:
        config, out = config_file(config_of({"pictures": pictures}), folder), folder / "picture.png"
        wanted = ("--steps", "2", "--size", "64x48", "--seed", "7", "--out", str(out), "--config", config)
        with command("generate", "a red circle", *wanted, folder=folder) as generate:
            assert generate.wait() == 0, generate.output
            assert f"{out}  seed 7" in generate.output
        assert Image.open(out).size == (64, 48)
