"""Ctrl-C at any time, and twice, ends every process that a command has started."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.deployments.commands import command, config_file, short_folder
from tests.deployments.live import config_of

MOMENTS = {
    "at once": ("Starting Ray Serve", None),
    "replicas start": ("no running replica", 0.3),
    "drawing": (r"step\s+[1-9]\d? of 100", None),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_leaves_no_process_and_no_file(pictures: Path, moment: str):
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
