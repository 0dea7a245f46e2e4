"""The shipped editor works through the official client."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from tests.deployments.support.bare import assert_same_picture, bare_frames
from tests.deployments.support.files import file_of
from tests.deployments.support.live import pixels_of
from tests.end_to_end.conftest import EDITS
from tests.pipelines.test_shipped import shares_of_colours
from tests.pipelines.test_shipped_editor import SIDE, circle_and_square

PROMPT = "make the circle blue"


def test_a_picture_is_changed_by_words(official: openai.OpenAI, models: dict[str, Path]) -> None:
    file = file_of(circle_and_square())
    fields = {"num_inference_steps": 20, "seed": 5}
    answer: Any = official.images.edit(model=EDITS, image=file, prompt=PROMPT, extra_body=fields)
    edited = pixels_of(base64.b64decode(answer.data[0].b64_json))
    size = f"{SIDE}x{SIDE}"
    assert_same_picture(edited, bare_frames(models, model=EDITS, prompt=PROMPT, image=file, size=size, **fields)[0])
    before = np.asarray(circle_and_square())
    assert shares_of_colours(before[None])["red"] > 0.02
    assert shares_of_colours(edited[None])["red"] < 0.005
    assert np.abs(edited[:, SIDE // 2 :].astype(int) - before[:, SIDE // 2 :]).mean() < 12, "the square is where it was"


def test_an_editor_wants_a_picture(official: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="picture"):
        official.images.generate(model=EDITS, prompt=PROMPT)
