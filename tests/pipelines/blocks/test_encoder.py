"""Encoders see the right part of a prompt and no weights that they do not need."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from pipelines.checkpoint import Checkpoint
from pipelines.request import NO_PICTURES, InputPicture, InputPictures
from pipelines.size import Size
from tests.pipelines.support.checkpoints import tiny_ltx, tiny_qwen, tiny_unknown
from tests.pipelines.support.references.picture_cases import small_pictures


@pytest.mark.parametrize(
    ("make", "transformer"),
    [(tiny_ltx.ltx2_few_layers, "transformer"), (tiny_unknown.sdxl, "unet"), (tiny_qwen.qwen_edit, "transformer")],
)
def test_encoder_and_decoder_read_no_weights_of_the_transformer(
    make: Callable[[Path], Path], transformer: str, tmp_path: Path
) -> None:
    """Blocks of LTX-2 and of SDXL name it among theirs, for its positions and a setting."""
    folder = make(tmp_path)
    for file in (folder / transformer).glob("*.safetensors"):
        file.unlink()
    checkpoint = Checkpoint(folder)
    with small_pictures():
        pictures = InputPictures(pictures=(InputPicture(width=48, height=32, mode="RGB", data=bytes(4608)),))
        size, num_pictures = Size(width=64, height=64), int(transformer == "transformer")
        request = checkpoint.defaults.request(size, prompt="a red circle", num_pictures=num_pictures)
        conditioning = checkpoint.text_encoder().encode(request, pictures if num_pictures else NO_PICTURES)
    assert conditioning.shapes
    checkpoint.decoder()


@pytest.mark.parametrize("make", [tiny_qwen.qwen_edit, tiny_qwen.qwen_edit_plus])
def test_of_a_long_prompt_the_beginning_is_seen(make: Callable[[Path], Path], tmp_path: Path) -> None:
    """These blocks would take the whole prompt, but the transformer has no places for later tokens."""
    folder = make(tmp_path)
    (folder / "troupe.json").write_text(json.dumps({"max_tokens": 8}))
    seen = InputPictures(pictures=(InputPicture(width=48, height=32, mode="RGB", data=bytes(range(256)) * 18),))
    with small_pictures():
        checkpoint = Checkpoint(folder)
        encoder, ask = checkpoint.text_encoder(), partial(checkpoint.defaults.request, Size(width=48, height=32))
        requests = (
            ask(prompt=words, negative_prompt=words, true_cfg_scale=2.0, num_pictures=1)
            for words in ("a red circle", "a red ci", "a red cat")
        )
        long, short, other = (encoder.encode(request, seen) for request in requests)
    assert long.shapes == short.shapes == other.shapes
    for name in ("prompt_embeds", "negative_prompt_embeds"):
        assert torch.equal(long.values[name], short.values[name])
        assert not torch.equal(long.values[name], other.values[name])
