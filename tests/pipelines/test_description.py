"""A checkpoint's folder describes the model to people, and names sizes that can be made."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipelines.checkpoint import Checkpoint
from pipelines.description import read_description
from pipelines.loading import shipped_checkpoints
from pipelines.models.spec import CLIP, PICTURE
from pipelines.size import largest_num_frames

COLOURS = ("red", "green", "blue", "yellow", "purple", "orange", "white", "black")


@pytest.mark.parametrize("name", shipped_checkpoints())
def test_shipped_models_say_what_they_draw(name: str) -> None:
    checkpoint = Checkpoint.open(name)
    description, defaults = checkpoint.description, checkpoint.defaults
    assert "eight colours" in description.text or all(colour in description.text for colour in COLOURS)
    assert len(description.prompts) >= 3
    assert description.sizes_within(defaults)[0] == f"{defaults.width}x{defaults.height}"


def test_a_folder_without_a_card_has_common_shapes(tmp_path: Path) -> None:
    defaults = Checkpoint.open("flux-shapes").defaults
    description = read_description(tmp_path, defaults)
    assert description.text == "Makes pictures from a prompt. Paints over a picture as the prompt says."
    assert len(description.prompts) == 3
    sizes = description.sizes_within(defaults)
    assert sizes[0] == "128x128"
    assert {"144x112", "112x144", "176x96"} <= set(sizes)


@pytest.mark.parametrize(
    ("takes", "text", "prompt"),
    [
        ({}, "Makes pictures from a prompt.", "fox"),
        ({"min_pictures": 1, "max_pictures": 1, "takes_mask": True, "needs_mask": True}, "masked area", "cat"),
        ({"min_pictures": 1, "max_pictures": 3}, "Changes up to 3 pictures as the prompt says.", "make it night"),
        ({"max_pictures": 1}, "Makes pictures from a prompt. Changes a picture as the prompt says.", "fox"),
        ({"kind": "video"}, "Makes clips from a prompt.", "runs"),
        (
            {"kind": "video", "needs_source": True, "max_pictures": 9},
            "Makes clips from up to 9 pictures, from a clip, or both, and a prompt.",
            "camera",
        ),
        ({"kind": "video", "needs_video": True}, "Changes clips as the prompt says.", "watercolour"),
        (
            {"kind": "video", "needs_video": True, "min_pictures": 1, "max_pictures": 1},
            "Makes clips from a picture, a clip and a prompt.",
            "camera",
        ),
        ({"needs_control": True}, "Makes pictures from a prompt and a control picture.", "fox"),
        (
            {"kind": "video", "min_pictures": 2, "max_pictures": 2},
            "Makes clips from 2 pictures and a prompt.",
            "camera",
        ),
        ({"kind": "video", "max_pictures": 1}, "clips from a prompt, or from a picture and a prompt.", "runs"),
        ({"min_pictures": 1, "max_pictures": 1, "num_layers": 4, "max_layers": 9}, "apart into 4 layers.", ""),
    ],
)
def test_a_model_without_a_card_is_described_by_what_it_takes(
    tmp_path: Path, takes: dict[str, Any], text: str, prompt: str
) -> None:
    """If a card has one of them, the other is the default."""
    defaults = replace(CLIP if takes.get("kind") == "video" else PICTURE, **takes)
    description = read_description(tmp_path, defaults)
    assert text in description.text
    assert any(prompt in example for example in description.prompts) or not prompt
    (tmp_path / "troupe.json").write_text(json.dumps({"card": {"text": "Its own."}}))
    assert read_description(tmp_path, defaults) == replace(description, text="Its own.")


def test_a_card_that_cannot_be_is_refused(tmp_path: Path) -> None:
    defaults = Checkpoint.open("flux-shapes").defaults
    for card, message in (
        ({"promts": []}, "promts"),
        ([], r"troupe.json: card is \[\]; it must be an object with text, sizes, prompts"),
        (None, "card is null; it must be an object"),
        ({"sizes": ["100x100"]}, "troupe.json: card.sizes: size is 100x100: width and height must be positive"),
        ({"sizes": ["128x128x5"]}, "'128x128x5': write it as WIDTHxHEIGHT in pixels, without frames"),
        ({"prompts": "a red circle"}, r"troupe.json: card.prompts must be a list of texts"),
        ({"text": ["red"]}, r"troupe.json: card.text must be a text"),
    ):
        (tmp_path / "troupe.json").write_text(json.dumps({"card": card}))
        with pytest.raises(ValueError, match=message):
            read_description(tmp_path, defaults)


def test_the_largest_number_of_frames_is_one_that_can_be() -> None:
    assert [largest_num_frames(given, 4) for given in (1, 4, 49, 50, 52, 53)] == [1, 1, 49, 49, 49, 53]
