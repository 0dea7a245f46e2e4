"""The number of pictures selects the model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deployments.requests.bodies import VideoBody
from deployments.requests.handle import needs_of_fields
from deployments.requests.model_choice import Needs, choose_card
from deployments.requests.request_errors import RequestError
from deployments.service.interface import ModelCard
from pipelines.checkpoint import Checkpoint
from pipelines.loading import resolve_configuration
from pipelines.request import MediaKind
from tests.deployments.support.fake_service import CLIPS, REFERRED_CLIPS, FakeService

CARDS = FakeService(takes_pictures=True).cards()


@pytest.mark.parametrize(
    ("kind", "num_pictures", "name"),
    [
        ("image", 0, "fake-pictures"),
        ("image", 1, "fake-edits"),
        ("image", 3, "fake-edits"),
        ("image", 4, "fake-edits"),
        ("video", 0, "fake-clips"),
        ("video", 1, "fake-begun-clips"),
    ],
)
def test_without_a_name_a_model_for_the_pictures_is_taken(kind: str, num_pictures: int, name: str) -> None:
    needs = Needs(num_pictures=num_pictures)
    assert choose_card(CARDS, None, kind, needs).name == name  # type: ignore[arg-type]
    assert choose_card(CARDS, "fake-pictures", "image", needs).name == "fake-pictures"
    with pytest.raises(RequestError):
        choose_card({}, None, "image", needs)


def test_an_empty_name_is_told_as_such() -> None:
    with pytest.raises(RequestError, match=r"^model is empty, and names none; models served: fake-pictures"):
        choose_card(CARDS, "", "image")


def test_a_model_that_only_inpaints_gets_no_picture_without_a_mask() -> None:
    cards = dict(reversed(list(FakeService(takes_pictures=True, only_inpaints=True).cards().items())))
    assert choose_card(cards, None, "image", Needs(num_pictures=1)).name == "fake-edits"
    assert choose_card(cards, None, "image", Needs(num_pictures=1, has_mask=True)).name == "fake-inpaints"


PUBLISHED = ("FLUX.1-dev", "Qwen-Image-Layered", "FLUX.1-Kontext-dev", "Qwen-Image-Edit-2509")


@pytest.fixture(scope="module")
def published() -> dict[str, ModelCard]:
    defaults = {name: Checkpoint.open(str(resolve_configuration(name)), weights=False).defaults for name in PUBLISHED}
    return {name: ModelCard(name=name, family="", created=0, defaults=one) for name, one in defaults.items()}


@pytest.mark.parametrize(
    ("needs", "name"),
    [
        (Needs(), "FLUX.1-dev"),
        (Needs(num_pictures=1), "FLUX.1-Kontext-dev"),
        (Needs(num_pictures=2), "Qwen-Image-Edit-2509"),
        (Needs(num_pictures=1, strength=0.5), "FLUX.1-dev"),
        (Needs(num_pictures=2, has_mask=True), "Qwen-Image-Edit-2509"),
        (Needs(num_pictures=1, num_layers=3), "Qwen-Image-Layered"),
    ],
)
def test_a_picture_goes_to_the_model_that_was_published_for_it(
    published: dict[str, ModelCard], needs: Needs, name: str
) -> None:
    """The models' pages say so: Kontext and Edit change pictures, FLUX.1 inpaints, Layered splits into layers."""
    assert choose_card(published, None, "image", needs).name == name


def test_a_model_that_may_go_without_a_control_picture_takes_both_kinds_of_requests() -> None:
    plain = FakeService().cards()["fake-pictures"].defaults
    follows = replace(plain, takes_control=True, control_scale=1.0)
    known = {"needs": replace(follows, needs_control=True), "follows": follows, "plain": plain}
    cards = {name: ModelCard(name=name, family="", created=0, defaults=one) for name, one in known.items()}
    assert choose_card(cards, None, "image", Needs(has_control=True)).name == "needs"
    assert choose_card(cards, None, "image").name == "follows"
    del cards["needs"]
    backwards = dict(reversed(cards.items()))
    assert choose_card(backwards, None, "image").name == "plain"
    assert choose_card(backwards, None, "image", Needs(has_control=True)).name == "follows"


def test_pictures_at_frames_go_to_a_model_that_takes_them_there() -> None:
    places = FakeService(takes_pictures=True).cards()["fake-begun-clips"].defaults
    begun = replace(places, takes_frame_indices=False)
    cards = {
        name: ModelCard(name=name, family="", created=0, defaults=one)
        for name, one in (("begun", begun), ("places", places))
    }
    asked = VideoBody(prompt="a", input_reference=(b"",), frame_indices=(0,))
    for needs in (Needs.of(asked), needs_of_fields(asked.model_dump())):
        assert choose_card(cards, None, "video", needs).name == "places"
    assert choose_card(cards, None, "video", replace(needs, has_frame_indices=False)).name == "begun"


def test_a_clip_goes_to_a_model_that_needs_an_adapter_only_beside_one() -> None:
    context = replace(FakeService().cards()["fake-clips"].defaults, max_video_frames=9, video_needs_lora=True)
    known = {"context": context, "changes": replace(context, video_needs_lora=False)}
    cards = {name: ModelCard(name=name, family="", created=0, defaults=one) for name, one in known.items()}
    clip = VideoBody(prompt="a", video=(b"-",))
    with_lora = clip.model_copy(update={"lora": (("ink", None),)})
    for body, name in ((clip, "changes"), (with_lora, "context")):
        for needs in (Needs.of(body), needs_of_fields(body.model_dump())):
            assert choose_card(cards, None, "video", needs).name == name
    assert choose_card(cards, None, "video").name == "context"


BOTH = FakeService(makes_both=True).cards()


@pytest.mark.parametrize(("kind", "size"), [("image", (96, 64)), ("video", (32, 32))])
def test_of_a_model_of_both_the_defaults_are_those_of_what_is_made(kind: MediaKind, size: tuple[int, int]) -> None:
    defaults = choose_card(BOTH, "fake-both", kind).defaults
    assert (defaults.kind, (defaults.width, defaults.height)) == (kind, size)


def test_a_model_of_pictures_alone_comes_before_one_of_both() -> None:
    cards = dict(reversed(list(BOTH.items())))
    assert next(iter(cards)) == "fake-both"
    assert choose_card(cards, None, "image").name == "fake-pictures"
    assert choose_card(cards, None, "video").name == "fake-both"
    del cards["fake-pictures"]
    assert choose_card(cards, None, "image").name == "fake-both"


def test_a_model_of_clips_alone_makes_no_pictures() -> None:
    with pytest.raises(
        RequestError, match="'fake-clips' makes videos, not images; image models served: fake-pictures, fake-both"
    ):
        choose_card(BOTH, "fake-clips", "image")


@pytest.mark.parametrize(
    ("needs", "name"),
    [
        (Needs(), "plain"),
        (Needs(num_pictures=1), "referred"),
        (Needs(num_pictures=3, has_video=True), "referred"),
        (Needs(has_video=True), "referred"),
    ],
)
def test_a_model_of_references_gets_no_words_alone(needs: Needs, name: str) -> None:
    made = {"referred": REFERRED_CLIPS, "plain": CLIPS}
    cards = {key: ModelCard(name=key, family="", created=0, defaults=one) for key, one in made.items()}
    assert choose_card(cards, None, "video", needs).name == name
