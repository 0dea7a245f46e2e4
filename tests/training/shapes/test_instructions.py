"""Words fit one edit alone, have many forms, and held-out phrasings differ from those of training."""

import random
from collections import Counter

import torch

from training.kontext_shapes.data import training_edits
from training.kontext_shapes.model import build_tokenizers
from training.shapes.boards import piece_at, random_board
from training.shapes.edits import KINDS, random_edit, training_edit
from training.shapes.instructions import EDIT_ANSWERS, edit_labels, instruction
from training.shapes.phrasings import HELD_OUT, PHRASINGS
from training.shapes.reading import NOT_ASKED
from training.shapes.references import Description, fits, reference, reference_phrase
from training.shapes.scenes import BACKGROUNDS
from training.shapes.tokens import MAX_LENGTH


def _words(text: str) -> set[str]:
    return set(text.lower().replace(",", " ").replace(".", " ").replace("?", " ").split())


def test_a_reference_means_one_piece() -> None:
    rng = random.Random(0)
    for _ in range(500):
        board = random_board(rng)
        piece = rng.choice(board.pieces)
        said = reference(board, piece, rng)
        assert [other for other in board.pieces if fits(other, said)] == [piece]


def test_references_are_of_every_form() -> None:
    rng = random.Random(1)
    boards = [random_board(rng) for _ in range(600)]
    said = [reference(board, board.pieces[0], rng) for board in boards]
    for name in ("shape", "colour", "size", "place"):
        assert {getattr(one, name) is None for one in said} == {True, False}
    assert Description() in said  # "it", of an only shape


def test_a_side_fits_its_corners_and_a_size_what_may_be_meant() -> None:
    corner, side = (piece_at(place, random.Random(2)) for place in ("top left", "left"))
    assert fits(corner, Description(place="left"))
    assert fits(corner, Description(place="top left"))
    assert not fits(side, Description(place="top left"))
    assert not fits(side, Description(place="centre"))


def test_words_of_a_reference_are_those_said() -> None:
    rng = random.Random(3)
    said = Description(shape="star", colour="red", size="small", place="top right")
    for _ in range(50):
        words = _words(reference_phrase(said, rng, compared=True))
        assert {"star", "red", "right"} <= words
        assert words & {"small", "little", "tiny", "smaller", "smallest"}


def test_instructions_name_what_is_to_be() -> None:
    rng = random.Random(4)
    for _ in range(600):
        edit = random_edit(rng)
        said = instruction(edit, rng, rng.choice((PHRASINGS, HELD_OUT)))
        words = _words(said.text)
        if said.made.colour and said.made.colour not in ("grey", "purple"):
            assert said.made.colour in words
        if said.made.shape in ("triangle", "star"):
            assert said.made.shape in words
        assert "none" not in words
        assert "{" not in said.text
        assert "  " not in said.text


def test_held_out_phrasings_are_new_but_their_words_are_not() -> None:
    assert PHRASINGS.keys() == HELD_OUT.keys()
    for kind, phrasings in HELD_OUT.items():
        assert not set(phrasings) & set(PHRASINGS[kind])
    rng = random.Random(5)
    trained = [instruction(training_edit(rng), rng).text for _ in range(6_000)]
    seen = set().union(*map(_words, trained))
    for _ in range(600):
        assert _words(instruction(training_edit(rng), rng, HELD_OUT).text) <= seen


def test_wording_is_free() -> None:
    rng = random.Random(6)
    edit = next(edit for edit in iter(lambda: random_edit(rng), None) if edit.kind == "move")
    texts = [instruction(edit, rng).text for _ in range(400)]
    assert len(set(texts)) > 200
    marks = Counter(("the" in _words(text), text[0].isupper(), text[-1] in ".?") for text in texts)
    assert len(marks) == 8


def test_instructions_fit_the_tokenizers() -> None:
    edits = training_edits(3_000, seed=0)
    for tokenizer in build_tokenizers(edits.before.captions):
        assert max(len(ids) for ids in tokenizer(edits.before.captions)["input_ids"]) < MAX_LENGTH


def test_labels_are_within_the_choices_and_say_what_the_words_say() -> None:
    edits = training_edits(300, seed=1)
    labels = edits.before.labels
    assert (labels[-1] == NOT_ASKED).all()
    assert (labels[:-1] >= 0).all()
    assert (labels[:-1] < torch.tensor(EDIT_ANSWERS)).all()
    rng = random.Random(7)
    edit = next(edit for edit in iter(lambda: random_edit(rng), None) if edit.kind == "remove")
    kind, *rest = edit_labels(instruction(edit, rng))[0]
    assert KINDS[kind] == "remove"
    assert rest[4:] == [0, 0, 0, 0]
    edit = next(edit for edit in iter(lambda: random_edit(rng), None) if edit.kind == "recolour")
    assert edit.new
    made = edit_labels(instruction(edit, rng))[0][5:]
    assert made == (0, BACKGROUNDS.index(edit.new.colour) + 1, 0, 0)
