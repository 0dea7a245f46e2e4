"""Recipes are named defaults of requests, and a request's own fields override them."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.cli.serving import parse_config
from deployments.config import CONFIGS
from deployments.http.answers import Model
from deployments.ingress import make_cards
from deployments.requests.bodies import ImageBody, VideoBody
from deployments.requests.handle import handle_request
from deployments.requests.recipe_choice import recipe_problems, with_recipe
from deployments.requests.request_errors import RequestError
from deployments.requests.rules import choose_steps
from deployments.requests.validation import validated
from deployments.service.interface import ModelCard
from pipelines.checkpoint import Checkpoint
from pipelines.loading import PUBLISHED, resolve_file, resolve_path
from pipelines.lora.source import ADAPTER_FILES, LoraSource
from pipelines.recipes import Recipe, merged
from pipelines.request import Lora, MediaRequest
from pipelines.solver import Solver, SolverLimits
from tests.deployments.http.conftest import build, client_of
from tests.deployments.http.routes.test_images import IMAGES
from tests.deployments.support.fake_service import CLIPS, PICTURES, FakeService

LIMITS = SolverLimits(scheduler="euler", schedulers=("euler", "unipc"), is_flow=True, inputs=("sigmas",))
INK, TURBO = Lora(name="ink", scale=0.5), Lora(name="turbo")
RECIPES = {
    "turbo": Recipe(num_inference_steps=2, guidance_scale=1.5, flow_shift=3.0, cache="off", scale=0.125, likeness=0.9),
    "steps": Recipe(sigmas=(1.0, 0.6, 0.2), true_cfg_scale=2.0, scheduler="unipc", lora=(Lora(name="ink", scale=0.7),)),
}
CARD = ModelCard(
    name="flux", family="f", created=0, defaults=replace(PICTURES, solver=LIMITS), loras=(INK, TURBO), recipes=RECIPES
)


def request_of(**fields: Any) -> MediaRequest:
    request, *_ = handle_request({"flux": CARD}, "id", {"prompt": "a", **fields})
    return request


def test_a_recipe_is_the_default() -> None:
    for named in ({"recipe": "turbo"}, {"model": "flux:turbo"}, {"model": "flux:turbo", "recipe": "turbo"}):
        request = request_of(**named)
        assert (request.num_inference_steps, request.guidance_scale) == (2, 1.5)
        assert request.solver == Solver(flow_shift=3.0)
        assert request.loras == (Lora(name="turbo", scale=0.125),)
        assert request.model == "flux"
    request = request_of(recipe="steps")
    assert (request.num_inference_steps, request.true_cfg_scale) == (3, 2.0)
    assert request.solver == Solver(sigmas=(1.0, 0.6, 0.2), scheduler="unipc")
    assert request.loras == (Lora(name="ink", scale=0.7),)
    plain = request_of()
    assert (plain.num_inference_steps, plain.loras, plain.solver) == (PICTURES.num_inference_steps, (), Solver())


def test_what_the_request_says_wins() -> None:
    request = request_of(recipe="turbo", num_inference_steps=5, guidance_scale=2.5, flow_shift=1.0, quality="high")
    assert (request.num_inference_steps, request.guidance_scale) == (5, 2.5)
    assert request.solver == Solver(flow_shift=1.0)
    request = request_of(recipe="steps", num_inference_steps=5, guidance_scale=2.5)
    assert (request.num_inference_steps, request.solver) == (5, Solver(scheduler="unipc"))
    assert (request.guidance_scale, request.true_cfg_scale) == (2.5, PICTURES.true_cfg_scale)
    assert request_of(recipe="turbo", sigmas=[1.0]).num_inference_steps == 1
    assert request_of(recipe="turbo", quality="high").num_inference_steps == 2


def test_adapters_are_added_to_those_of_the_recipe() -> None:
    both = request_of(recipe="turbo", lora=[{"name": "ink"}])
    assert both.loras == (INK, Lora(name="turbo", scale=0.125))
    assert request_of(recipe="turbo", lora=[{"name": "turbo", "scale": 1.0}]).loras == (TURBO,)
    assert request_of(model="flux:ink", recipe="turbo").loras == both.loras


@pytest.mark.parametrize(
    ("fields", "param", "code", "told"),
    [
        ({"recipe": "fast"}, "recipe", "recipe_not_found", "flux has no recipe 'fast'; its recipes: turbo, steps"),
        ({"model": "flux:fast"}, "model", "lora_not_found", "its adapters: ink, turbo; its recipes: turbo, steps"),
        ({"model": "flux:turbo", "recipe": "steps"}, "recipe", "invalid_value", "model names 'turbo'; give one"),
        ({"recipe": "turbo", "negative_prompt": "b"}, "negative_prompt", "invalid_value", "true_cfg_scale is 1"),
    ],
)
def test_an_unknown_recipe_is_refused(fields: dict[str, Any], param: str, code: str, told: str) -> None:
    with pytest.raises(RequestError, match=told) as caught:
        request_of(**fields)
    assert (caught.value.param, caught.value.code) == (param, code)


def test_recipes_are_listed_with_what_they_change() -> None:
    first, *others = Model.all_of(CARD)
    assert [(lora.name, lora.scale) for lora in first.loras] == [(INK.name, INK.scale)]
    assert first.recipes["turbo"] == {
        "num_inference_steps": 2,
        "guidance_scale": 1.5,
        "flow_shift": 3.0,
        "cache": "off",
        "lora": [{"name": "turbo", "scale": 0.125}],
        "likeness": 0.9,
    }
    assert [(one.id, one.parent) for one in others] == [
        ("flux:ink", "flux"),
        ("flux:turbo", "flux"),
        ("flux:steps", "flux"),
    ]


@pytest.mark.parametrize(
    ("fields", "num_steps"),
    [
        ({"quality": "low"}, 2),
        ({"quality": "low", "num_inference_steps": 5}, 5),
        ({"quality": "hd"}, 3),
        ({"num_inference_steps": 5}, 5),
        ({"quality": "low", "recipe": "steps"}, 3),
        ({}, PICTURES.num_inference_steps),
    ],
    ids=str,
)
def test_a_quality_stands_for_a_recipe(fields: dict[str, Any], num_steps: int) -> None:
    card = replace(CARD, qualities={"low": "turbo", "high": "steps"})
    request, *_ = handle_request({"flux": card}, "id", {"prompt": "a", **fields})
    assert request.num_inference_steps == num_steps
    by_low = fields.get("quality") == "low" and "recipe" not in fields
    assert (request.loras == (Lora(name="turbo", scale=0.125),)) == by_low
    assert Model.of(card).steps == {"low": 2, "medium": PICTURES.num_inference_steps, "high": 3}


def test_the_default_quality_stands_for_one_too() -> None:
    card = replace(CARD, qualities={"medium": "turbo"})
    for fields, num_steps in (({}, 2), ({"quality": "auto"}, 2), ({"num_inference_steps": 5}, 5)):
        request, *_ = handle_request({"flux": card}, "id", {"prompt": "a", **fields})
        assert (request.num_inference_steps, bool(request.loras)) == (num_steps, num_steps == 2)


@pytest.mark.parametrize("named", [{"recipe": "quick"}, {"model": "fake-pictures:quick"}, {"quality": "low"}], ids=str)
async def test_http_knows_recipes(named: dict[str, Any], tmp_path: Path) -> None:
    service = FakeService(recipes={"quick": Recipe(num_inference_steps=1)}, qualities={"low": "quick"})
    async with client_of(build(service, tmp_path)) as client:
        answer = await client.post(IMAGES, json={"prompt": "a", **named})
        assert (answer.status_code, answer.json()["num_inference_steps"]) == (200, 1)
        assert answer.json()["quality"] == named.get("quality")
        clip = await client.post("/v1/videos", json={"prompt": "a", "recipe": "quick"})
        assert clip.json()["num_inference_steps"] == 1
        listed = (await client.get("/v1/models/fake-pictures")).json()
        assert listed["recipes"] == {"quick": {"num_inference_steps": 1}}
        assert (await client.get("/v1/models/fake-pictures:quick")).json()["parent"] == "fake-pictures"
        unknown = await client.post(IMAGES, json={"prompt": "a", "recipe": "slow"})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (400, "recipe_not_found")
    assert [request.num_inference_steps for request in service.performed][:1] == [1]


LAPTOP = yaml.safe_load((CONFIGS / "laptop.yaml").read_text())


def served_with(recipes: Any, loras: Any = ()) -> Any:
    document = copy.deepcopy(LAPTOP)
    model = document["applications"][0]["args"]["models"][0]
    model |= {"recipes": recipes, "loras": list(loras)}
    return parse_config(document).app


def test_a_configuration_names_recipes_and_their_adapters() -> None:
    two = {"path": "a", "file": "high.safetensors", "file_2": "low.safetensors", "scale": 0.5}
    app = served_with({"few": {"num_inference_steps": 4, "flow_shift": 2}, "two": two}, [{"path": "always"}])
    assert app.models[0].adapters == (
        LoraSource(path="always"),
        LoraSource(name="two", path="a", file="high.safetensors", scale=0.5, part="transformer"),
        LoraSource(name="two", path="a", file="low.safetensors", scale=0.5, part="transformer_2"),
    )
    card = make_cards(app)["flux-shapes"]
    assert card.loras == (Lora(name="two", scale=0.5),)
    body = with_recipe(validated(ImageBody, {"prompt": "a", "recipe": "few"}), card)
    assert (body.num_inference_steps, body.flow_shift) == (4, 2.0)


@pytest.mark.parametrize("name", ["its own", "the model's", "none"])
def test_the_steps_that_are_listed_of_a_recipe_are_those_of_its_requests(name: str) -> None:
    """This includes the model's own number, and both kinds."""
    both = replace(CLIPS, picture_width=64, picture_height=48, num_inference_steps=20, min_steps=1, solver=LIMITS)
    recipes = {
        "its own": Recipe(num_inference_steps=4, true_cfg_scale=1.5),
        "the model's": Recipe(num_inference_steps=20, true_cfg_scale=1.5),
        "none": Recipe(true_cfg_scale=1.5),
    }
    card = replace(CARD, defaults=both, loras=(), recipes=recipes, qualities={"low": "its own"})
    (listed,) = (one for one in Model.all_of(card) if one.id == f"flux:{name}")
    for quality, num_steps in listed.steps.items():
        request, *_ = handle_request({"flux": card}, "id", {"prompt": "a", "recipe": name, "quality": quality})
        assert num_steps == request.num_inference_steps, quality
    for kind, defaults in (("video", listed.defaults), ("image", listed.picture_defaults)):
        request, *_ = handle_request({"flux": card}, "id", {"prompt": "a", "recipe": name, "kind": kind})
        assert defaults is not None
        told = defaults.num_inference_steps, defaults.true_cfg_scale, defaults.width
        assert told == (request.num_inference_steps, request.true_cfg_scale, request.width)


def test_the_laptops_model_lists_its_recipe() -> None:
    app = parse_config(LAPTOP).app
    model, by_recipe, *_ = Model.all_of(make_cards(app)["flux-shapes"])
    (source,) = app.models[0].adapters
    assert adapter_bytes(source) < 3_000_000
    assert (by_recipe.id, model.loras) == ("flux-shapes:four-steps", ())
    assert (by_recipe.defaults.num_inference_steps, set(by_recipe.steps.values())) == (4, {4})
    assert (model.defaults.num_inference_steps, model.steps["low"]) == (20, 10)
    changed = model.recipes["four-steps"]
    assert 0.9 < changed.pop("likeness") < 1
    assert changed == {
        "num_inference_steps": 4,
        "guidance_scale": 3.5,
        "lora": [{"name": "four-steps", "scale": 1.0}],
    }


def adapter_bytes(source: LoraSource) -> int:
    return resolve_file(source.path, source.file, ADAPTER_FILES).stat().st_size


def test_a_recipe_may_name_the_precision_of_attention() -> None:
    """The model lists it; other requests may use it too, but no other model's requests."""
    card = make_cards(served_with({"quick": {"attention": "fp8"}}))["flux-shapes"]
    model = Model.of(card)
    assert (model.attentions, model.recipes["quick"]) == (("auto", "fp8"), {"attention": "fp8"})

    def attention(**fields: Any) -> str | None:
        return handle_request({card.name: card}, "id", {"prompt": "a", **fields})[0].attention

    assert (attention(recipe="quick"), attention(attention="fp8")) == ("fp8", "fp8")
    assert (attention(), attention(attention="auto")) == (None, None)
    assert attention(recipe="quick", attention="auto") is None, "the request wins"
    with pytest.raises(RequestError, match="attention is 'fp8'; flux is served with auto; name one of them") as caught:
        request_of(attention="fp8")
    assert caught.value.param == "attention"


@pytest.mark.torch
def test_steps_of_such_a_recipe_are_those_of_a_gang_in_float8() -> None:
    from engines.core.tensors import relative_difference
    from tests.pipelines.lora.support.jobs import Setting, painted

    folder, base = resolve_path("flux-shapes"), {"prompt": "a yellow star", "size": "64x64", "num_inference_steps": 3}
    card = make_cards(served_with({"quick": {"attention": "fp8"}}))["flux-shapes"]
    ways: tuple[dict[str, Any], ...] = ({"recipe": "quick"}, {})
    named, plain = (handle_request({card.name: card}, "id", {**base, "seed": 3, **more})[0] for more in ways)
    by_turns = painted(folder, (), [named, plain, named], Setting())
    (exact,), (in_float8,) = (painted(folder, (), [plain], Setting(attention=one)) for one in ("auto", "fp8"))
    for latents, expected in zip(by_turns, (in_float8, exact, in_float8), strict=True):
        assert latents.equal(expected)
    assert relative_difference(in_float8, exact) > 0.001, "the two differ"


@pytest.mark.torch
def test_the_laptops_recipe_equals_diffusers() -> None:
    """Its picture equals that of diffusers' own pipeline with the configuration's adapter and settings."""
    from engines.core.tensors import relative_difference
    from tests.pipelines.lora.support.jobs import TOLERANCE, Setting, expected, painted

    app = parse_config(LAPTOP).app
    (source,) = app.models[0].adapters
    cards, body = make_cards(app), {"prompt": "a yellow star", "model": "flux-shapes", "size": "64x64", "seed": 3}
    plain, by_recipe = (handle_request(cards, "id", {**body, **more})[0] for more in ({}, {"recipe": "four-steps"}))
    plain = replace(plain, num_inference_steps=by_recipe.num_inference_steps)
    folder, file = resolve_path("flux-shapes"), resolve_file(source.path, source.file, ADAPTER_FILES)
    ours = painted(folder, app.models[0].adapters, [plain, by_recipe], Setting())
    for latents, request, adapters in zip(ours, (plain, by_recipe), ((), ((file, 1.0),)), strict=True):
        assert relative_difference(latents, expected(folder, request, adapters)) <= TOLERANCE
    assert relative_difference(ours[1], ours[0]) > 0.05, "the adapter is there"


@pytest.mark.parametrize(
    ("recipes", "told"),
    [
        ({"a:b": {"num_inference_steps": 4}}, "'a:b' is no name for a recipe"),
        ({"few": {"steps": 4}}, "recipes.few.steps is no key here"),
        ({"few": {"file": "a"}}, "needs a path"),
        ({"few": {"path": "a", "scale": 11}}, "scale is 11"),
        ({"few": {}}, "the recipe few changes nothing; recipes that ship with this model's family:"),
        ({"few": {"num_inference_steps": 1000}}, "the recipe few of flux-shapes: num_inference_steps is 1000"),
        ({"few": {"scheduler": "ddim"}}, "the recipe few of flux-shapes: scheduler is 'ddim'"),
        ({"few": {"lora": [{"name": "ink"}]}}, "the recipe few of flux-shapes: the model has no adapter ink"),
        ({"few": {"attention": "fp4"}}, "recipes.few.attention is 'fp4'"),
        ({"few": {"precision": "fp8"}}, "the recipe few has precision, .* serve a second model of the same path with"),
        ({"few": {"quantization": "int8"}}, "the recipe few has quantization, and requests share one copy"),
    ],
)
def test_what_cannot_be_is_told_before_anything_starts(recipes: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make_cards(served_with(recipes))


def test_a_quality_without_its_recipe_is_told_before_anything_starts() -> None:
    document = copy.deepcopy(LAPTOP)
    document["applications"][0]["args"]["models"][0] |= {"qualities": {"low": "few"}}
    with pytest.raises(ValueError, match=r"qualities\.low of flux-shapes is 'few'; the model's recipes: four-steps"):
        make_cards(parse_config(document).app)


SHIPPED: dict[str, dict[str, int]] = {
    "FLUX.1-dev": {"turbo-8": 8, "hyper-8": 8, "hyper-16": 16},
    "FLUX.1-schnell": {},
    "FLUX.1-Kontext-dev": {},
    "Qwen-Image": {"lightning-4": 4, "lightning-8": 8},
    "Qwen-Image-Edit": {"lightning-4": 4, "lightning-8": 8},
    "Qwen-Image-Edit-2509": {"lightning-4": 4, "lightning-8": 8},
    "Qwen-Image-Layered": {},
    "LTX-2": {"distilled-8": 8, "two-stages": 30, "two-stages-distilled": 8},
    "MiniMax-H3": {"turbo-4": 4, "turbo-8": 8},
    "Wan2.1-T2V-1.3B": {},
    "Wan2.1-T2V-14B": {"lightx2v-4": 4},
    "Wan2.1-I2V-14B-480P": {},
    "Wan2.2-T2V-A14B": {"lightning-4": 4},
    "Wan2.2-TI2V-5B": {},
}


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_recipes_suit_their_models(name: str) -> None:
    """They are defaults for recipes that a configuration names; the user supplies the adapter."""
    checkpoint = Checkpoint.open(str(PUBLISHED / name), weights=False)
    shipped = checkpoint.spec.recipes(checkpoint.path)
    assert shipped.keys() == SHIPPED[name].keys()
    configured = merged({one: Recipe(path="a.safetensors") for one in shipped}, shipped)
    loras = tuple(Lora(name=one) for one in shipped)
    card = ModelCard(name="m", family="f", created=0, defaults=checkpoint.defaults, loras=loras, recipes=configured)
    assert list(recipe_problems(card)) == []
    for one, num_steps in SHIPPED[name].items():
        kind = VideoBody if card.defaults.kind == "video" else ImageBody
        body = with_recipe(validated(kind, {"prompt": "a", "recipe": one}), card)
        assert choose_steps(body, card.defaults) == num_steps
        own = body.lora
        if isinstance(body, VideoBody) and body.second_stage_sigmas:
            own = body.second_stage_lora
        assert [lora for lora, _ in own or ()] == [one]
