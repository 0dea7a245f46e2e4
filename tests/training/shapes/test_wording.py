"""Free wording says exactly the scene, in words that training has, and held-out templates are apart from its own."""

import random
import re
from collections import Counter
from dataclasses import fields

import pytest

from tests.training.shapes.support.read_back import ReadItem, ReadScene, read_motion, read_still
from training.flux_shapes.train import tokenizers_of
from training.pool import captioned_motions, captioned_stills
from training.shapes.captions import CaptionParts
from training.shapes.scenes import PLACES, Item, MotionScene, Scene, random_motion_scene, random_scene
from training.shapes.tokens import MAX_LENGTH, sentence_pieces
from training.shapes.wording.grammar import chosen, filled, needs, phrase
from training.shapes.wording.motions import HELD_OUT_TOWARDS, TOWARDS
from training.shapes.wording.phrases import NEW, SHOWN, Wording, free_caption, free_motion_caption
from training.shapes.wording.templates import HELD_OUT, TRAINING, Templates

COUNT = 1_500
WORDINGS = pytest.mark.parametrize("wording", [SHOWN, NEW], ids=["shown", "held out"])
STAR = Scene(items=(Item(shape="star", colour="purple", size="large", place="centre"),), background="white")
TURN = MotionScene(item=Item(shape="star", colour="purple", size="large"), background="white", motion="turn")


def _read_item(item: Item, parts: CaptionParts) -> ReadItem:
    place = PLACES[item.place] if parts.place and item.place else None
    return ReadItem(shape=item.shape, colour=item.colour, size=item.size if parts.size else None, column_and_row=place)


def _said(scene: Scene, parts: CaptionParts) -> ReadScene:
    """What a caption of these parts says."""
    return ReadScene(
        items=tuple(_read_item(item, parts) for item in scene.items),
        background=scene.background if parts.background else None,
        relation=scene.relation if parts.place else None,
    )


def _is_read(scene: Scene, parts: CaptionParts, text: str) -> bool:
    """Whether a caption is read as this scene; without a relation in any order."""
    read, said = read_still(text), _said(scene, parts)
    ordered = said.relation is not None
    return (read.background, read.relation) == (said.background, said.relation) and (
        read.items == said.items if ordered else Counter(read.items) == Counter(said.items)
    )


def _plain(text: str) -> str:
    return " ".join(re.findall(r"[a-z]+", text.lower()))


def test_choices_optional_parts_and_articles() -> None:
    rng = random.Random(0)
    assert {chosen("(a|b(c|d))!", rng) for _ in range(60)} == {"a!", "bc!", "bd!"}
    assert needs("{item}[ {at}], {on}") == {"item", "on"}
    assert filled("~ [{size} ]{colour} star", {"colour": lambda: "orange"}, rng) == "an orange star"
    assert {filled("@ star", {}, rng) for _ in range(200)} == {
        "a star",
        "the star",
        "one star",
        "a single star",
        "star",
    }
    assert phrase(("{x} {y}", "{x}"), {"x": lambda: "1"}, rng) == "1"


@pytest.mark.parametrize(
    ("text", "colours", "background", "relation"),
    [
        ("one large purple star in the middle, on white", ["purple"], "white", None),
        ("On white, a red disc beneath a tiny blue box.", ["blue", "red"], "white", "above"),
        ("green background; a red circle and to the left of it a yellow star", ["yellow", "red"], "green", "left of"),
        ("right of the red dot is a violet tile, everything else is grey", ["red", "purple"], "grey", "left of"),
    ],
)
def test_the_rules_read_english(text: str, colours: list[str], background: str, relation: str | None) -> None:
    read = read_still(text)
    assert ([item.colour for item in read.items], read.background, read.relation) == (colours, background, relation)


@WORDINGS
def test_a_caption_says_exactly_its_scene(wording: Wording) -> None:
    rng = random.Random(1)
    for _ in range(COUNT):
        scene, parts = random_scene(rng), CaptionParts.random(rng)
        text = free_caption(scene, rng, parts, wording)
        assert _is_read(scene, parts, text), (text, scene, parts)


@WORDINGS
def test_a_clips_caption_says_exactly_its_scene(wording: Wording) -> None:
    rng = random.Random(2)
    for _ in range(COUNT):
        scene, parts = random_motion_scene(rng), CaptionParts.random(rng)
        text = free_motion_caption(scene, rng, parts, wording)
        read, motions = read_motion(text)
        still = Scene(items=(scene.item,), background=scene.background)
        assert (read, motions) == (_said(still, parts), {scene.motion}), text


def test_a_caption_of_a_mirrored_pair_is_read_as_another_scene() -> None:
    rng = random.Random(3)
    first, second = (Item(shape=shape, colour="red", size="small") for shape in ("circle", "star"))
    scene, mirrored = (
        Scene(items=items, background="white", relation="above") for items in ((first, second), (second, first))
    )
    for _ in range(200):
        text = free_caption(scene, rng, CaptionParts())
        assert _is_read(scene, CaptionParts(), text)
        assert not _is_read(mirrored, CaptionParts(), text)


def test_no_held_out_template_is_one_of_training() -> None:
    for field in fields(Templates):
        shown, held_out = (getattr(templates, field.name) for templates in (TRAINING, HELD_OUT))
        assert held_out
        assert not set(shown) & set(held_out), field.name
    assert all(TOWARDS[side] != HELD_OUT_TOWARDS[side] for side in TOWARDS)


def test_no_held_out_caption_is_one_of_training() -> None:
    rng, everything = random.Random(4), CaptionParts()
    shown = {_plain(free_caption(STAR, rng, everything)) for _ in range(8_000)}
    held_out = {_plain(free_caption(STAR, rng, everything, NEW)) for _ in range(2_000)}
    assert len(shown) > 4_000
    assert not shown & held_out
    shown = {_plain(free_motion_caption(TURN, rng, everything)) for _ in range(8_000)}
    held_out = {_plain(free_motion_caption(TURN, rng, everything, NEW)) for _ in range(2_000)}
    assert not shown & held_out


def test_held_out_captions_are_made_of_words_that_training_has() -> None:
    """Each word is one piece of the tokenizers that are made from training's captions, and no caption is too long.
    Of a held-out one, CLIP, which has a token for each part of "top-left", may miss the end."""
    rng = random.Random(5)
    stills, motions = captioned_stills(8_000, 0).captions, captioned_motions(8_000, 0).captions
    clip, t5 = tokenizers_of(stills)
    pieces = sentence_pieces(motions, ignore_case=True)
    said = [free_caption(random_scene(rng), rng, wording=NEW) for _ in range(COUNT)]
    moving = [free_motion_caption(random_motion_scene(rng), rng, wording=NEW) for _ in range(COUNT)]
    for tokenizer, texts in ((t5, stills + said), (pieces, motions + moving), (clip, stills)):
        assert max(map(len, tokenizer(texts)["input_ids"])) <= MAX_LENGTH
    for tokenizer, texts in ((t5, said), (pieces, moving)):
        words = set(" ".join(texts).lower().translate(str.maketrans(",.:;!", "     ")).split())
        assert [word for word in words if len(tokenizer.tokenize(word)) > 1] == []
        assert tokenizer.tokenize("A RED STAR!") == tokenizer.tokenize("a red star!")
