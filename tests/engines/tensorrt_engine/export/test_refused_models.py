"""Models without an engine are refused, each with its own message, before any weights exist."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engines.core.spec import ParallelSpec
from engines.tensorrt_engine.export.exported import export
from engines.tensorrt_engine.export.trace import offline_team
from pipelines.checkpoint import Checkpoint
from pipelines.models.registry import FAMILY_FOLDERS, load_spec
from tests.pipelines.support.checkpoints import (
    tiny_animate,
    tiny_flux3,
    tiny_helios,
    tiny_hunyuan,
    tiny_models,
    tiny_others,
    tiny_qwen,
)
from tests.pipelines.support.checkpoints.first_steps import first_step

REGION = r"^the traced forward has a region of its own \(wrap_with_autocast\), which no engine can hold: use engine: "
MASK = r"^this model masks keys \(text of several lengths\), which no TensorRT engine does: use engine: torch$"
ALONE = "^this model has blocks that see one stream of tokens alone, which no TensorRT engine of several ranks does: "
CLIP = "^this model passes over the driving clip before its first step, which no TensorRT engine does: use engine: "
PROMPT = "^this model has pictures between the words of a prompt, at places that no TensorRT engine can read: "
REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "ErnieImageTransformer2DModel": (tiny_others.ernie_image, REGION),
    "Flux3Transformer2DModel": (tiny_flux3.flux3, ALONE),
    "HeliosTransformer3DModel": (tiny_helios.helios, REGION),
    "HunyuanVideo15Transformer3DModel": (tiny_hunyuan.hunyuan_video, MASK),
    "Ideogram4Transformer2DModel": (tiny_others.ideogram4, REGION),
    "Krea2Transformer2DModel": (tiny_others.krea2, MASK),
    "QwenImage21Transformer2DModel": (tiny_qwen.qwen21, PROMPT),
    "WanAnimate2Transformer3DModel": (tiny_animate.wan_animate2, CLIP),
    "ZImageTransformer2DModel": (tiny_models.z_image, REGION),
}


SLOW = ("ErnieImageTransformer2DModel", "HeliosTransformer3DModel", "Ideogram4Transformer2DModel")
"""Z-Image covers them in quick runs: it is refused for the same reason."""


@pytest.mark.parametrize(
    "class_name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in REFUSED]
)
def test_an_export_for_two_ranks_says_why_not(class_name: str, tmp_path: Path) -> None:
    make, sentence = REFUSED[class_name]
    folder = make(tmp_path)
    assert Checkpoint(folder).eager_only(is_split=True).startswith(f"{class_name} ")
    model, (branch, *_) = Checkpoint(folder).denoiser(), first_step(folder)
    with offline_team(ParallelSpec(ulysses=2)) as team, pytest.raises(ValueError, match=sentence):
        export(model, branch, team)


def test_no_other_class_is_refused_before_it_is_tried() -> None:
    known = {name: load_spec(name) for name in FAMILY_FOLDERS}
    assert {name for name, one in known.items() if one.eager_only or one.eager_split} == {*REFUSED}
    assert [name for name, one in known.items() if one.eager_split] == ["Flux3Transformer2DModel"]
