"""The split holds: no scene of the evaluation was drawn or named in training."""

import random
from collections import Counter

from training.shapes.captions import CaptionParts, caption, motion_caption
from training.shapes.scenes import (
    BACKGROUNDS,
    Item,
    MotionScene,
    Scene,
    far_apart,
    held_out_motion_scene,
    held_out_scene,
    is_held_out,
    is_held_out_motion,
    training_motion_scene,
    training_scene,
)

EVERYTHING = CaptionParts()


def _combinations(scene: Scene) -> set[tuple[str, ...]]:
    placed: set[tuple[str, ...]] = {
        (item.shape, item.colour, item.place) for item in scene.items if item.place is not None
    }
    if scene.relation is None:
        return placed
    first, second = scene.items
    return {(first.shape, first.colour, scene.relation, second.shape, second.colour)}


def test_training_and_held_out_scenes_never_meet() -> None:
    rng = random.Random(0)
    trained = {c for _ in range(20_000) for c in _combinations(training_scene(rng))}
    for _ in range(2_000):
        scene = held_out_scene(rng)
        assert is_held_out(scene)
        assert not _combinations(scene) <= trained


def test_training_and_held_out_motions_never_meet() -> None:
    def key(scene: MotionScene) -> tuple[str, ...]:
        return scene.item.shape, scene.item.colour, scene.motion

    rng = random.Random(0)
    trained = {key(training_motion_scene(rng)) for _ in range(10_000)}
    held_out = {key(held_out_motion_scene(rng)) for _ in range(2_000)}
    assert trained
    assert held_out
    assert not trained & held_out
    assert all(not is_held_out_motion(training_motion_scene(rng)) for _ in range(100))


def test_videos_of_training_show_small_and_faint_shapes_more_often() -> None:
    rng = random.Random(3)
    scenes = [training_motion_scene(rng) for _ in range(6_000)]
    sizes = Counter(scene.item.size for scene in scenes)
    assert 1.25 < sizes["small"] / sizes["medium"] < 1.65
    assert 1.75 < sizes["small"] / sizes["large"] < 2.3
    grounds = Counter(scene.background for scene in scenes if scene.item.colour == "purple")
    assert 1.3 < grounds["grey"] / grounds["white"] < 2.1


def test_a_mirrored_caption_is_the_same_scene() -> None:
    """ "A above B" and "B below A" come from one scene, so the split cannot leak through the wording."""
    first = Item(shape="circle", colour="red", size="small")
    second = Item(shape="square", colour="blue", size="large")
    scene = Scene(items=(first, second), background="white", relation="above")
    texts = {caption(scene, random.Random(seed), EVERYTHING).lower() for seed in range(200)}
    assert any("circle above" in text or "circle over" in text for text in texts)
    assert any("square below" in text or "square under" in text for text in texts)
    assert not any("square above" in text or "circle below" in text for text in texts)


def test_scenes_can_be_told_from_their_background_and_do_not_touch() -> None:
    rng = random.Random(1)
    for _ in range(2_000):
        scene = training_scene(rng)
        assert scene.background in BACKGROUNDS
        assert scene.background not in {item.colour for item in scene.items}
        places = [item.place for item in scene.items if item.place]
        assert len(places) < 2 or far_apart(*places)


def test_captions_name_what_they_are_told_to() -> None:
    item = Item(shape="star", colour="yellow", size="small", place="bottom left")
    scene = Scene(items=(item,), background="black")
    for seed in range(100):
        rng = random.Random(seed)
        full = caption(scene, rng, EVERYTHING).lower()
        assert "yellow star" in full
        assert "left" in full
        assert "black background" in full
        bare = caption(scene, rng, CaptionParts(size=False, place=False, background=False)).lower()
        assert "yellow star" in bare
        assert "left" not in bare
        assert "background" not in bare


def test_every_motion_has_words() -> None:
    rng = random.Random(2)
    texts = [motion_caption(held_out_motion_scene(rng), rng) for _ in range(300)]
    assert all(len(text.split()) >= 4 for text in texts)
    assert len(set(texts)) > 200
