"""The reader's questions match the scene, and the empty prompt has none."""

import random

import torch

from training.shapes.reading import (
    MOTION_ANSWERS,
    NOT_ASKED,
    STILL_ANSWERS,
    Reader,
    label_rows,
    motion_labels,
    still_labels,
)
from training.shapes.scenes import (
    COLOURS,
    MOTIONS,
    PLACES,
    SHAPES,
    Item,
    Scene,
    training_motion_scene,
    training_scene,
)


def test_a_pair_by_relation_lies_on_two_sides() -> None:
    first = Item(shape="star", colour="blue", size="small")
    second = Item(shape="circle", colour="red", size="large")
    labels = still_labels(Scene(items=(first, second), background="grey", relation="left of"))
    there = {place: label for place, label in zip(PLACES, labels, strict=True) if label[0]}
    assert set(there) == {"left", "right"}
    assert there["left"][:2] == (SHAPES.index("star") + 1, COLOURS.index("blue") + 1)
    assert len({label[3] for label in labels}) == 1


def test_labels_are_within_the_choices() -> None:
    rng = random.Random(0)
    stills = label_rows([still_labels(training_scene(rng)) for _ in range(200)])
    motions = label_rows([motion_labels(training_motion_scene(rng)) for _ in range(200)])
    for labels, answers in ((stills, STILL_ANSWERS), (motions, MOTION_ANSWERS)):
        assert (labels[-1] == NOT_ASKED).all()
        assert (labels[:-1] >= 0).all()
        assert (labels[:-1] < torch.tensor(answers)).all()
    assert {label[4] for label in motions[:-1, 0].tolist()} == set(range(len(MOTIONS)))


def test_the_reader_learns_what_tokens_say_and_skips_the_empty_prompt() -> None:
    torch.manual_seed(0)
    rng = random.Random(0)
    scenes = [training_scene(rng) for _ in range(16)]
    tokens, labels = torch.randn(17, 12, 32), label_rows([still_labels(scene) for scene in scenes])
    reader = Reader(32, len(PLACES), STILL_ANSWERS)
    optimizer = torch.optim.Adam(reader.parameters(), lr=1e-2)
    for _ in range(200):
        optimizer.zero_grad()
        loss = reader.loss(tokens[:16], labels[:16])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert loss.item() < 0.1
    torch.testing.assert_close(reader.loss(tokens, labels), reader.loss(tokens[:16], labels[:16]))
