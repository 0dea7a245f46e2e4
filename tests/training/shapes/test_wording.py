"""Free wording says exactly the scene, in words of training, and held-out templates differ from its own."""

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from hashlib import sha256
from itertools import chain, combinations
from typing import Any

import pytest

from tests.training.shapes.support.derivation import PLAIN_RULES, Grammar, free_rules
from tests.training.shapes.support.read_back import ReadItem, ReadScene, read_motion, read_still
from training.evaluate import held_out_motion_prompts, held_out_prompts
from training.flux_shapes.train import tokenizers_of
from training.pool import captioned_motions, captioned_stills
from training.shapes.captions import CaptionParts, caption, motion_caption
from training.shapes.scenes import PLACES, Item, Scene, random_motion_scene, random_scene
from training.shapes.tokens import MAX_LENGTH, sentence_pieces
from training.shapes.wording import fresh, unseen
from training.shapes.wording.grammar import chosen, filled, needs, phrase
from training.shapes.wording.phrases import NEW, NEWER, SHOWN, Wording, free_caption, free_motion_caption
from training.shapes.wording.templates import Templates

Captions = tuple[Callable[..., str], Callable[[random.Random], object]]
"""A function for captions, and one for their scenes."""
COUNT = 1_500
WORDINGS = pytest.mark.parametrize("wording", [SHOWN, NEW, NEWER], ids=["shown", "unseen", "fresh"])
FREE, PLAIN = Grammar(free_rules(SHOWN)), Grammar(PLAIN_RULES)


def _read_item(item: Item, parts: CaptionParts) -> ReadItem:
    place = PLACES[item.place] if parts.place and item.place else None
    return ReadItem(shape=item.shape, colour=item.colour, size=item.size if parts.size else None, column_and_row=place)


def _read_scene(scene: Scene, parts: CaptionParts) -> ReadScene:
    """Return the scene of a caption with these parts."""
    return ReadScene(
        items=tuple(_read_item(item, parts) for item in scene.items),
        background=scene.background if parts.background else None,
        relation=scene.relation if parts.place else None,
    )


def _is_read(scene: Scene, parts: CaptionParts, text: str) -> bool:
    """Return whether a caption is read as this scene; without a relation in any order."""
    read, said = read_still(text), _read_scene(scene, parts)
    ordered = said.relation is not None
    return (read.background, read.relation) == (said.background, said.relation) and (
        read.items == said.items if ordered else Counter(read.items) == Counter(said.items)
    )


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
        assert (read, motions) == (_read_scene(still, parts), {scene.motion}), text


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


def _sayings(templates: Iterable[str]) -> set[str]:
    """Return all texts that templates can make, without articles."""
    wholes = [text.replace("[", "").replace("]", "") for text in templates]
    return {" ".join(re.sub(r"[@~]|\b(a|an|the)\b", "", text).split()) for whole in wholes for text in _choices(whole)}


def _choices(template: str) -> set[str]:
    """Return all possible results of `chosen`."""
    match = re.search(r"\(([^()]*)\)", template)
    if not match:
        return {template}
    ways = {template[: match.start()] + word + template[match.end() :] for word in match[1].split("|")}
    return set().union(*map(_choices, ways))


def _kinds(wording: Wording, places: Mapping[str, tuple[str, ...]], corners: tuple[str, ...]) -> dict[str, set[str]]:
    texts = {field.name: getattr(wording.templates, field.name) for field in fields(Templates)}
    texts |= {"corner": corners, "thing": wording.things}
    texts |= {"place": chain(*places.values()), "towards": chain(*wording.towards.values())}
    return {kind: _sayings(templates) for kind, templates in texts.items()}


def test_the_three_wordings_share_no_template_of_a_sentence_or_of_a_part() -> None:
    """They are compared verbatim, without articles; all may use the plainest order of a thing's words."""
    kinds = (
        _kinds(SHOWN, dict(SHOWN.places_at), SHOWN.corners_at),
        _kinds(NEW, unseen.HELD_OUT_PLACES_AT, unseen.HELD_OUT_CORNERS_AT),
        _kinds(NEWER, fresh.FRESH_PLACES_AT, fresh.FRESH_CORNERS_AT),
    )
    for one, other in combinations(kinds, 2):
        for kind, texts in one.items():
            assert texts or kind in ("part", "opening")
            assert texts & other[kind] <= {"{size} {colour} {shape}"}, kind


def test_a_grammar_derives_what_it_says_and_nothing_else() -> None:
    grammar = Grammar({"caption": ("{x}[ and {x}]", "no (way|(more|less))"), "x": ("@ star", "(red|blue) circle")})
    for text in ("a star", "The star and: one blue circle!", "no way", "No less"):
        assert grammar.derives(text), text
    for text in ("", "star and", "circle", "no", "no no way", "star star", "a star and a star and a star"):
        assert not grammar.derives(text), text


def test_all_captions_of_training_are_derived_by_its_grammar() -> None:
    rng = random.Random(6)
    free: list[Captions] = [(free_caption, random_scene), (free_motion_caption, random_motion_scene)]
    plain: list[Captions] = [(caption, random_scene), (motion_caption, random_motion_scene)]
    for make, scene_of in free:
        assert all(FREE.derives(make(scene_of(rng), rng)) for _ in range(400))
    for make, scene_of in plain:
        assert all(PLAIN.derives(make(scene_of(rng), rng)) for _ in range(400))


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_training_cannot_say_what_evaluation_asks_for_in_templates_that_it_never_shows(seed: int) -> None:
    for prompts in (held_out_prompts, held_out_motion_prompts):
        texts = {name: [text for _, text in prompts(240, seed, name)] for name in ("plain", "free", "unseen", "fresh")}
        assert [text for text in texts["unseen"] + texts["fresh"] if FREE.derives(text) or PLAIN.derives(text)] == []
        assert all(FREE.derives(text) for text in texts["free"])
        assert all(PLAIN.derives(text) for text in texts["plain"])


@pytest.mark.parametrize(
    ("prompts", "digest"), [(held_out_prompts, "3dcc1770bd157f04"), (held_out_motion_prompts, "0ffcea2129f0d572")]
)
def test_unseen_prompts_are_those_of_earlier_reports(prompts: Any, digest: str) -> None:
    text = "\n".join(text for _, text in prompts(240, 1, "unseen"))
    assert sha256(text.encode()).hexdigest()[:16] == digest


@pytest.mark.parametrize("wording", [NEW, NEWER], ids=["unseen", "fresh"])
def test_held_out_captions_are_made_of_words_that_training_has(wording: Wording) -> None:
    """Each word is one piece of the tokenizers made from training's captions, and no caption is too long. CLIP has a
    token for each part of "top-left", and may miss the end of a held-out one."""
    rng = random.Random(5)
    stills, motions = captioned_stills(8_000, 0).captions, captioned_motions(8_000, 0).captions
    clip, t5 = tokenizers_of(stills)
    pieces = sentence_pieces(motions, ignore_case=True)
    said = [free_caption(random_scene(rng), rng, wording=wording) for _ in range(COUNT)]
    moving = [free_motion_caption(random_motion_scene(rng), rng, wording=wording) for _ in range(COUNT)]
    for tokenizer, texts in ((t5, stills + said), (pieces, motions + moving), (clip, stills)):
        assert max(map(len, tokenizer(texts)["input_ids"])) <= MAX_LENGTH
    for tokenizer, texts in ((t5, said), (pieces, moving)):
        words = set(" ".join(texts).lower().translate(str.maketrans(",.:;!", "     ")).split())
        assert [word for word in words if len(tokenizer.tokenize(word)) > 1] == []
        assert tokenizer.tokenize("A RED STAR!") == tokenizer.tokenize("a red star!")
