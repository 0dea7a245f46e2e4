"""At its start, before any picture is requested, a gang runs a typical step and a known one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines.checkpoint import Checkpoint
from pipelines.run import PlainEngine
from pipelines.size import Size
from tests.pipelines.support.checkpoints import tiny_pictures, tiny_qwen

MODELS: dict[str, Callable[[Path], Path]] = {
    "flux": tiny_pictures.flux,
    "flux kontext": tiny_pictures.flux_kontext,
    "flux2 dev": tiny_pictures.flux2_dev,
    "flux2 klein base": tiny_pictures.flux2_klein_base,
    "qwen": tiny_qwen.qwen,
    "qwen edit": tiny_qwen.qwen_edit,
    "qwen edit plus": tiny_qwen.qwen_edit_plus,
    "qwen layered": tiny_qwen.qwen_layered,
    "qwen 2.1": tiny_qwen.qwen21,
    "z image": tiny_pictures.z_image,
}
WITH_PICTURES = {"qwen edit": 2 * 15, "qwen edit plus": 2 * 15, "qwen layered": (1 + 4 + 1) * 4 * 15}
"""Numbers of picture tokens: inputs and results, which may be layers and their composite."""


@pytest.mark.parametrize("name", MODELS)
def test_a_gang_can_begin(name: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint(MODELS[name](tmp_path))
    multiple = checkpoint.defaults.size_multiple
    typical = checkpoint.defaults.request(Size(width=5 * multiple, height=3 * multiple))
    model = checkpoint.denoiser(typical=typical)
    assert model.typical_lengths is not None
    if name in WITH_PICTURES:
        assert model.typical_lengths["image"] == WITH_PICTURES[name]
    engine = PlainEngine(model=model)
    for branches in (checkpoint.first_step(typical), model.probe()):
        for prediction in engine.predict(branches):
            assert prediction.isfinite().all()
