"""The web page in a real browser sends requests with clips, control pictures, frames, recipes and adapters."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deployments.service.interface import ModelCard
from pipelines.lora.source import LoraLimits
from pipelines.media.clip import encode_clip
from pipelines.recipes import Recipe
from pipelines.request import Lora, MediaRequest
from pipelines.solver import SolverLimits
from tests.deployments.http.conftest import build, serving
from tests.deployments.http.support.chromium import CONTROL, Chromium, needs_chromium
from tests.deployments.http.support.page_steps import fill, press, send, shown_error, take, written
from tests.deployments.support.fake_service import CHANGED_CLIPS, CLIPS, PICTURES, REFERRED_CLIPS, FakeService
from tests.deployments.support.files import file_of, noise

pytestmark = needs_chromium

NUM_FRAMES = 11
WIDE, SMALL = (400, 100), (48, 12)
INK = Lora(name="ink", scale=0.8)
RECIPES = {
    "quick": Recipe(num_inference_steps=2, guidance_scale=1.5),
    "by-levels": Recipe(sigmas=(1.0, 0.6, 0.2)),
}
INPUTS = ("image", "mask", "video", "control_image", "frame_indices", "strength", "recipe")
CONTROLS = ("control_scale", "control_guidance_start", "control_guidance_end")
SHOWN = f"{[*INPUTS, *CONTROLS]}.filter((name) => fields[name].checkVisibility())"


class Service(FakeService):
    """Its model for clips from pictures takes three; its model for pictures has recipes and adapters, which can be
    added.
    """

    def cards(self) -> Mapping[str, ModelCard]:
        cards = dict(super().cards())
        begun, pictures = cards["fake-begun-clips"], cards["fake-pictures"]
        cards["fake-begun-clips"] = replace(begun, defaults=replace(begun.defaults, max_pictures=3))
        defaults = replace(pictures.defaults, solver=SolverLimits(scheduler="euler", is_flow=True, inputs=("sigmas",)))
        limits = LoraLimits(max_loras=1)
        pictures = replace(pictures, defaults=defaults, recipes=RECIPES, loras=(INK,), runtime_loras=limits)
        cards["fake-pictures"] = pictures
        return cards


@pytest.fixture
def service() -> FakeService:
    others = {"fake-referred-clips": REFERRED_CLIPS}
    return Service(takes_pictures=True, takes_clips=True, takes_control=True, makes_both=True, defaults=others)


@pytest.fixture
def page(browser: Chromium, url: str) -> Chromium:
    browser.resize(1366, 625)
    browser.open(url)
    browser.evaluate("fields.prompt.focus()")
    browser.type("a")
    return browser


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    return written(tmp_path / "a.png", file_of(noise(64, 48)))


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    frames = np.stack([np.asarray(noise(48, 32, seed=seed)) for seed in range(NUM_FRAMES)])
    return written(tmp_path / "a.mp4", encode_clip(frames, 8))


def generate(page: Chromium, service: FakeService) -> MediaRequest:
    """Return the request that the server has received, once its picture or clip is on its card."""
    before = len(service.performed)
    send(page)
    assert len(service.performed) == before + 1
    return service.performed[-1]


SHOWN_INPUTS = {
    "fake-pictures": ["recipe"],
    "fake-clips": [],
    "fake-edits": ["image", "mask", "strength"],
    "fake-begun-clips": ["image", "frame_indices"],
    "fake-changed-clips": ["video", "strength"],
    "fake-continued-clips": ["video"],
    "fake-controlled": ["control_image", *CONTROLS],
    "fake-both": ["image"],
    "fake-referred-clips": ["image", "video"],
}


def test_a_model_shows_what_it_takes_and_nothing_else(page: Chromium) -> None:
    """It stays within the form's width, however long a model's prompts are."""
    for model, shown in SHOWN_INPUTS.items():
        page.evaluate(f"models.get('{model}').prompts = ['a very long prompt '.repeat(20)]")
        take(page, model)
        assert page.evaluate(SHOWN) == shown, model
        assert page.evaluate("making.disabled") is (model != "fake-both"), model
        assert page.evaluate("adapters.checkVisibility()") is (model == "fake-pictures"), model
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), model
        assert page.evaluate("form.scrollWidth <= form.clientWidth"), model


def test_a_model_of_clips_draws_pictures_of_words_alone(page: Chromium) -> None:
    take(page, "fake-both")
    page.evaluate("making.value = 'image'; making.onchange()")
    assert page.evaluate(SHOWN) == []


def test_a_clip_decides_size_and_length(page: Chromium, service: FakeService, clip: Path) -> None:
    take(page, "fake-changed-clips")
    page.press("Enter", CONTROL)
    assert page.evaluate("fields.video.validationMessage") == "This model changes clips: choose one"
    page.choose("fields.video", clip)
    assert page.evaluate("[fields.width, fields.num_frames].map((one) => one.placeholder)") == ["the clip's"] * 2
    fill(page, strength=0.75)
    request = generate(page, service)
    assert (request.model, request.num_video_frames, request.strength) == ("fake-changed-clips", 9, 0.75)
    assert (request.width, request.height, request.num_frames) == (48, 32, 9)
    fill(page, width=64, height=64, num_frames=5)
    request = generate(page, service)
    assert (request.width, request.height, request.num_frames) == (64, 64, 5), "the form's values"
    press(page, "Remove the clip")
    assert page.evaluate("[fields.width.value, fields.num_frames.value]") == ["64", "5"]
    assert page.evaluate("[fields.video.required, fields.video.files.length]") == [True, 0]


def test_references_are_pictures_a_clip_or_both(
    page: Chromium, service: FakeService, picture: Path, clip: Path
) -> None:
    take(page, "fake-referred-clips")
    problem = "fields.image.validationMessage"
    assert page.evaluate(problem) == "This model needs a picture or a clip: choose one"
    page.choose("fields.video", clip)
    assert page.evaluate(problem) == ""
    request = generate(page, service)
    assert (request.num_pictures, request.num_video_frames) == (0, NUM_FRAMES)
    page.choose("fields.image", picture)
    request = generate(page, service)
    assert (request.num_pictures, request.num_video_frames) == (1, NUM_FRAMES)


def test_a_mask_of_a_clip_is_a_clip_or_a_picture(browser: Chromium, tmp_path: Path, picture: Path, clip: Path) -> None:
    service = FakeService(
        defaults={"masked": replace(CHANGED_CLIPS, masks_video=True, takes_strength=False, control_scale=1.0)}
    )
    with serving(build(service, tmp_path)) as url:
        browser.open(url)
        browser.evaluate("fields.prompt.focus()")
        browser.type("a")
        take(browser, "masked")
        assert browser.evaluate(SHOWN) == ["mask", "video", "control_scale"]
        browser.choose("fields.video", clip)
        fill(browser, control_scale=0.5)
        for mask in (clip, picture):
            browser.choose("fields.mask", mask)
            request = generate(browser, service)
            assert (request.has_mask, request.control_scale) == (True, 0.5)
            video, masks = service.inputs[-1].video, service.inputs[-1].video_mask
            assert masks is not None
            assert (masks == video) is (mask == clip)


def test_a_clip_of_ours_is_an_input_by_its_id(page: Chromium, service: FakeService) -> None:
    """By keyboard, the model that takes clips is selected, and the new card links to the old one."""
    take(page, "fake-clips")
    generate(page, service)
    first = page.evaluate("gallery.firstChild.id")
    press(page, "Use as input")
    chosen = "[fields.model.value, document.activeElement.name, document.querySelector('#source small').textContent]"
    assert page.evaluate(chosen) == ["fake-changed-clips", "prompt", "Clip: a"]
    request = generate(page, service)
    assert (request.source_clip_id, request.num_video_frames) == (first, 17)
    assert page.evaluate("gallery.firstChild.querySelector('small a').hash") == f"#{first}"
    press(page, "Remove the clip", 1)
    assert page.evaluate("[chosenClip(), document.getElementById('source').checkVisibility()]") == [None, False]
    press(page, "Use as input", 1)
    assert page.evaluate("chosenClip()") == first
    press(page, "Delete", 1)
    page.wait_for("chosenClip() === null")


def test_a_picture_of_ours_is_an_input_as_a_file(page: Chromium, service: FakeService) -> None:
    generate(page, service)
    press(page, "Use as input")
    page.wait_for("fields.width.value === '64' && fields.model.value === 'fake-edits'")
    fill(page, strength=0.5)
    request = generate(page, service)
    assert (request.model, request.num_pictures, request.strength) == ("fake-edits", 1, 0.5)
    press(page, "Remove the picture")
    assert page.evaluate("[fields.image.files.length, document.activeElement.name]") == [0, "image"]


def test_pictures_are_sent_with_their_mask_and_in_their_shape(
    page: Chromium, service: FakeService, tmp_path: Path
) -> None:
    take(page, "fake-edits")
    assert page.evaluate("fields.prompt.required")
    wide, other, mask, small = (
        written(tmp_path / f"{index}.png", file_of(noise(*size, mode, seed=index)))
        for index, (size, mode) in enumerate(((WIDE, "RGB"), (WIDE, "RGB"), (WIDE, "RGBA"), (SMALL, "RGB")))
    )
    page.choose("fields.image", wide, other)
    page.choose("fields.mask", mask)
    page.wait_for("fields.width.value === '128'")
    fill(page, strength=0.5)
    request = generate(page, service)
    assert (request.num_pictures, request.has_mask, request.strength) == (2, True, 0.5)
    assert (request.width, request.height) == (128, 32), "smaller"
    page.choose("fields.image", small)
    page.wait_for("fields.width.value === '48' && fields.height.value === '16'")


def test_a_control_picture_with_its_weight_and_steps(page: Chromium, service: FakeService, picture: Path) -> None:
    take(page, "fake-controlled")
    page.press("Enter", CONTROL)
    assert page.evaluate("form.querySelector('input:invalid').name") == "control_image"
    page.choose("fields.control_image", picture)
    page.wait_for("fields.height.value === '48'")
    fill(page, control_scale=0.5, control_guidance_start=0.25, control_guidance_end=0.75)
    request = generate(page, service)
    assert (request.has_control, request.num_pictures, request.width, request.height) == (True, 0, 64, 48)
    weights = (request.control_scale, request.control_guidance_start, request.control_guidance_end)
    assert weights == (0.5, 0.25, 0.75)
    fill(page, control_scale="", control_guidance_start="", control_guidance_end="")
    request = generate(page, service)
    assert (request.control_scale, request.control_guidance_start, request.control_guidance_end) == (None,) * 3


def test_pictures_at_frames(page: Chromium, service: FakeService, picture: Path, tmp_path: Path) -> None:
    take(page, "fake-begun-clips")
    others = [written(tmp_path / name, picture.read_bytes()) for name in ("b.png", "c.png")]
    page.choose("fields.image", picture, *others)
    page.press("Enter", CONTROL)
    assert page.evaluate("fields.frame_indices.validationMessage").startswith("Write the frame of each picture")
    fill(page, frame_indices="0, 8")
    assert "3 in all, and 2 are written" in page.evaluate("fields.frame_indices.validationMessage")
    fill(page, frame_indices="0, 8,-1")
    request = generate(page, service)
    assert (request.num_pictures, request.frame_indices) == (3, (0, 8, -1))
    page.choose("fields.image", picture)
    fill(page, frame_indices="")
    assert generate(page, service).frame_indices == ()


def test_a_recipe_decides_what_the_form_leaves_open(page: Chromium, service: FakeService) -> None:
    def choose(recipe: str) -> None:
        page.evaluate(f"fields.recipe.value = '{recipe}'; fields.recipe.onchange()")

    assert page.evaluate("[...fields.model.options].filter((one) => one.value.includes(':')).length") == 0
    choose("quick")
    assert page.evaluate("[fields.num_inference_steps.placeholder, fields.guidance_scale.placeholder]") == ["2", "1.5"]
    request = generate(page, service)
    assert (request.num_inference_steps, request.guidance_scale) == (2, 1.5)
    fill(page, num_inference_steps=3)
    request = generate(page, service)
    assert (request.num_inference_steps, request.guidance_scale) == (3, 1.5), "the form wins"
    choose("by-levels")
    request = generate(page, service)
    assert (request.solver.sigmas, request.guidance_scale) == ((1.0, 0.6, 0.2), 3.5)
    choose("")
    request = generate(page, service)
    assert (request.num_inference_steps, request.solver.sigmas) == (4, ())


def test_adapters_are_named_added_and_deleted(page: Chromium, service: FakeService, tmp_path: Path) -> None:
    page.evaluate("adapters.open = true; loras.querySelector('[type=checkbox]').focus()")
    page.press("Space")
    assert generate(page, service).loras == (INK,)
    page.evaluate("rows[0].number.value = '0.7'")
    fill(page, seed=5)
    page.choose("loraFiles", written(tmp_path / "chalk.safetensors", b"b"), written(tmp_path / "config.json", b"{}"))
    page.evaluate("loraName.focus()")
    page.press("Enter")
    page.wait_for("rows.length === 2")
    assert page.evaluate("[fields.seed.value, gallery.children.length, loraFiles.files.length]") == ["5", 1, 0]
    (added,) = service.loaded.values()
    assert {path.name for path in Path(added.folder).iterdir()} == {"adapter_config.json", "adapter.safetensors"}
    page.evaluate("loras.querySelector('[aria-label=\"Scale of chalk\"]').focus()")
    page.evaluate("document.activeElement.select()")
    page.type("0.5")
    request = generate(page, service)
    assert [(lora.name, lora.scale) for lora in request.loras] == [("chalk", 0.5), ("ink", 0.7)]
    page.choose("loraFiles", tmp_path / "chalk.safetensors")
    press(page, "Add")
    assert "has an adapter or a recipe 'chalk' already" in shown_error(page)
    press(page, "Delete the adapter chalk")
    page.wait_for("rows.length === 1")
    assert service.loaded == {}
    page.evaluate("gallery.querySelector('.failure button').click()")
    assert generate(page, service).loras == (replace(INK, scale=0.7),)


DROP = """(target, names, content) => {
  const data = Uint8Array.from(atob(content), (one) => one.charCodeAt(0));
  const types = { png: "image/png", webp: "image/webp", gif: "image/gif", mp4: "video/mp4" };
  const brought = new DataTransfer();
  for (const name of names) brought.items.add(new File([data], name, { type: types[name.split(".")[1]] }));
  if (!names.length) brought.setData("text/plain", "a");
  Object.defineProperty(brought, "dropEffect", { value: "none", writable: true });  // a script's own ignores changes
  const taken = ["dragover", "drop"].map((kind) => {
    const event = new DragEvent(kind, { dataTransfer: brought, bubbles: true, cancelable: true });
    return !target.dispatchEvent(event);
  });
  return [...taken, brought.dropEffect];
}"""
NAMES = "[fields.image, fields.mask].map((field) => [...field.files].map((file) => file.name))"


def drop(page: Chromium, target: str, *names: str) -> list[Any]:
    """Return whether the page takes files, or else a text, from the browser, and how the pointer looks."""
    content = base64.b64encode(file_of(noise(64, 48))).decode()
    taken: list[Any] = page.evaluate(f"({DROP})({target}, {json.dumps(names)}, '{content}')")
    return taken


def test_dropped_files_go_where_they_are_taken(page: Chromium) -> None:
    take(page, "fake-changed-clips")
    drop(page, "document.body", "a.png")
    assert shown_error(page) == "a.png is no MP4, MOV, WebM or GIF clip"
    drop(page, "document.body", "a.mp4")
    assert page.evaluate("fields.video.files[0].name") == "a.mp4"
    take(page, "fake-edits")
    assert drop(page, "document.body", "a.png", "b.webp") == [True, True, "copy"]
    assert drop(page, "fields.mask", "c.png") == [True, True, "copy"]
    assert drop(page, "fields.mask") == [False, False, "none"]
    assert page.evaluate(NAMES) == [["a.png", "b.webp"], ["c.png"]]
    page.wait_for("fields.height.value === '48'")


def test_no_file_is_opened_that_cannot_be_taken(page: Chromium) -> None:
    for model, target, names, error in (
        ("fake-both", "document.body", ("a.png", "b.png"), "one picture is taken here: drop one"),
        ("fake-edits", "document.body", ("a.png", "b.gif"), "b.gif is no PNG, JPEG or WebP picture"),
        ("fake-edits", "fields.mask", ("a.png", "b.png"), "one picture is taken here: drop one"),
    ):
        take(page, model)
        assert drop(page, target, *names) == [True, True, "copy"]
        assert shown_error(page) == error
        assert page.evaluate(NAMES) == [[], []]
    take(page, "fake-pictures")
    assert drop(page, "document.body", "a.png") == [True, True, "none"]


def test_a_model_of_both_makes_what_the_form_says(page: Chromium, service: FakeService) -> None:
    take(page, "fake-both")
    for kind, size, numbers in (("video", (32, 32), ["num_frames", "fps"]), ("image", (96, 64), ["n"])):
        page.evaluate(f"making.value = '{kind}'; making.onchange()")
        assert page.evaluate("['n', 'num_frames', 'fps'].filter((name) => !fields[name].disabled)") == numbers
        request = generate(page, service)
        assert (request.kind, request.width, request.height) == (kind, *size)


def test_every_control_of_every_model_has_a_name(page: Chromium, picture: Path, clip: Path) -> None:
    """The browser gives the names to screen readers; files are chosen and all parts open."""
    page.evaluate("document.querySelectorAll('details').forEach((one) => one.open = true)")
    roles = {"textbox", "combobox", "button", "spinbutton", "checkbox"}
    for model in page.evaluate("[...models.keys()]"):
        take(page, model)
        for field, file in (("image", picture), ("mask", picture), ("control_image", picture), ("video", clip)):
            if page.evaluate(f"!fields.{field}.disabled"):
                page.choose(f"fields.{field}", file)
        nodes: list[dict[str, Any]] = page.call("Accessibility.getFullAXTree")["nodes"]
        found = [node for node in nodes if node.get("role", {}).get("value") in roles and not node["ignored"]]
        names = [node.get("name", {}).get("value") for node in found]
        assert all(names), model
        assert len(names) == len(set(names)), (model, sorted(names))


OPTIONS = """
["layers", "scheduler", "cache", "generate_sound", "enhance_prompt"].filter((name) => fields[name].checkVisibility())
"""
SOLVER = SolverLimits(scheduler="euler", schedulers=("euler", "heun"))


def options_service() -> FakeService:
    """Return models with a scheduler to choose, with few steps alone, with sound, and with layers."""
    clips = replace(CLIPS, solver=SOLVER, make_sound=True)
    few = replace(PICTURES, max_steps=8, num_inference_steps=8)
    models = {"fake-clips": clips, "fake-few": few, "fake-pictures": replace(PICTURES, takes_cache=False)}
    return FakeService(takes_apart=True, makes_both=True, enhances_prompts=False, defaults=models)


SHOWN_OPTIONS = {
    "fake-pictures": ["enhance_prompt"],
    "fake-few": ["enhance_prompt"],
    "fake-clips": ["scheduler", "cache", "generate_sound", "enhance_prompt"],
    "fake-layers": ["layers", "cache", "enhance_prompt"],
    "fake-both": ["cache", "generate_sound", "enhance_prompt"],
}


@pytest.mark.parametrize("service", [options_service()])
def test_options_are_those_of_the_model(page: Chromium) -> None:
    for model, shown in SHOWN_OPTIONS.items():
        take(page, model)
        assert page.evaluate(OPTIONS) == shown, model
        assert page.evaluate("form.scrollWidth <= form.clientWidth"), model


def test_a_server_without_an_enhancer_shows_none(page: Chromium) -> None:
    """A picture of a model for clips has no sound either."""
    take(page, "fake-both")
    page.evaluate("making.value = 'image'; making.onchange()")
    assert page.evaluate(OPTIONS) == ["cache"]


@pytest.mark.parametrize("service", [options_service()])
def test_options_are_sent_where_they_are_chosen(page: Chromium, service: FakeService) -> None:
    take(page, "fake-clips")
    request = generate(page, service)
    usual = (request.solver.scheduler, request.cache, request.sound, request.enhance_prompt)
    assert usual == ("", "off", None, False)
    fill(page, scheduler="heun", cache="fast", num_inference_steps=12)
    page.evaluate("fields.generate_sound.click()")
    request = generate(page, service)
    assert (request.solver.scheduler, request.cache, request.sound) == ("heun", "fast", False)
    page.evaluate("fields.enhance_prompt.click()")
    assert page.evaluate("wanted(chosenModel()).enhance_prompt") is True
    take(page, "fake-both")
    request = generate(page, service)
    assert (request.solver.scheduler, request.cache, request.sound) == ("", "off", None), "another model begins anew"


@pytest.mark.parametrize("service", [options_service()])
def test_each_layer_that_is_chosen_has_a_card(page: Chromium, service: FakeService, tmp_path: Path) -> None:
    """Its model enlarges small pictures, and describes them itself."""
    take(page, "fake-layers")
    assert not page.evaluate("fields.prompt.required")
    page.choose("fields.image", written(tmp_path / "small.png", file_of(noise(*SMALL))))
    page.wait_for("fields.width.value === '128' && fields.height.value === '32'")
    fill(page, layers=3)
    assert generate(page, service).num_layers == 3
    page.wait_for("gallery.querySelectorAll('a[download]').length === 3")
    assert page.evaluate("gallery.querySelectorAll('.card').length") == 3
