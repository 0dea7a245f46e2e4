"""The recipe of a request: its settings where the request has none of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

from deployments.requests.bodies import ImageBody, MediaBody, VideoBody
from deployments.requests.fields import AskedLora, Quality
from deployments.requests.model_choice import choose_second_stage, split_name
from deployments.requests.request_errors import RequestError, shown
from deployments.requests.rules import (
    QUALITIES,
    choose_attention,
    choose_scales,
    choose_solver,
    choose_steps,
    quality_steps,
)
from deployments.requests.size_choice import choose_size
from deployments.requests.validation import validated
from deployments.service.interface import ModelCard
from pipelines.defaults import Defaults
from pipelines.recipes import NO_RECIPE, Recipe
from pipelines.request import Lora

B = TypeVar("B", bound=MediaBody)
GROUPS = (("guidance_scale", "true_cfg_scale"), ("num_inference_steps", "sigmas", "timesteps"))
"""Fields that say one thing: a request that gives one of them decides about all."""


def with_recipe(body: B, card: ModelCard) -> B:
    """Return ``body`` with the settings of its recipe: in ``recipe``, behind its model's name, or by its quality.

    RequestError for an unknown recipe, or two of them.
    """
    name = recipe_name(body, card)
    if name is None:
        return body
    recipe, (model, behind) = card.recipes[name], split_name(body.model)
    given = {field for field in type(body).model_fields if getattr(body, field) is not None}
    for group in GROUPS:
        given |= set(group) if given & set(group) else set()
    changes = {field: value for field, value in recipe.settings.items() if field not in given}
    changes |= {"lora": _joined(recipe.loras(name, card.loras), body.lora)}
    if isinstance(body, VideoBody) and (later := recipe.second_stage_loras(name, card.loras)):
        changes |= {"second_stage_lora": _joined(later, body.second_stage_lora)}
    changes |= {"model": model if behind == name else body.model}
    if body.recipe is None and behind != name:
        changes["quality"] = QUALITIES[body.quality or "auto"]
    return body.model_copy(update=changes | {"recipe": body.recipe or (name if behind == name else None)})


def _joined(loras: tuple[Lora, ...], asked: tuple[AskedLora, ...] | None) -> tuple[AskedLora, ...]:
    """Return the adapters of a recipe that were not asked for otherwise, then those that were."""
    names = {lora for lora, _ in asked or ()}
    return (*((lora.name, lora.scale) for lora in loras if lora.name not in names), *(asked or ()))


def recipe_name(body: MediaBody, card: ModelCard) -> str | None:
    """Return the name of the body's recipe; None if it names none and its quality stands for none."""
    behind = split_name(body.model)[1]
    if body.recipe is None:
        return behind if behind in card.recipes else recipe_of_quality(body, card)
    if body.recipe not in card.recipes:
        known = ", ".join(card.recipes) or "none"
        message = f"{card.name} has no recipe {shown(body.recipe)}; its recipes: {known}"
        raise RequestError(message, "recipe", code="recipe_not_found")
    if behind in card.recipes and behind != body.recipe:
        raise RequestError(f"recipe is {shown(body.recipe)}, and model names {shown(behind)}; give one", "recipe")
    return body.recipe


def recipe_of_quality(body: MediaBody, card: ModelCard) -> str | None:
    """Return the recipe that the body's quality stands for. A number of steps wins over a quality left out."""
    if body.quality in (None, "auto") and (body.num_inference_steps or body.sigmas or body.timesteps):
        return None
    return card.qualities.get(QUALITIES[body.quality or "auto"])


def steps_of_quality(quality: Quality, card: ModelCard, name: str | None = None) -> int:
    """Return the number of steps of ``quality``: its recipe's, or a share of the model's default.

    ``name``: requests name that recipe, which then is the one that counts.
    """
    recipe = card.recipes.get(card.qualities.get(quality, "") if name is None else name, NO_RECIPE)
    given = len(recipe.sigmas or recipe.timesteps) or recipe.num_inference_steps
    return given or quality_steps(quality, card.defaults)


def recipe_defaults(name: str, card: ModelCard) -> Defaults:
    """Return the steps and scales of requests that name a recipe and nothing else, with the model's other defaults."""
    body = with_recipe(_body_of(name, card), card)
    guidance_scale, true_cfg_scale = choose_scales(body, card)
    return replace(
        card.defaults,
        num_inference_steps=choose_steps(body, card.defaults),
        guidance_scale=guidance_scale,
        true_cfg_scale=true_cfg_scale,
    )


def _body_of(name: str, card: ModelCard) -> MediaBody:
    return validated(VideoBody if card.defaults.kind == "video" else ImageBody, {"prompt": "a", "recipe": name})


def recipe_document(name: str, recipe: Recipe, card: ModelCard) -> dict[str, Any]:
    """Return the settings of a recipe as a JSON object, with its adapters."""
    each = {"lora": recipe.loras(name, card.loras), "second_stage_lora": recipe.second_stage_loras(name, card.loras)}
    named = {key: [{"name": lora.name, "scale": lora.scale} for lora in loras] for key, loras in each.items() if loras}
    likeness = {} if recipe.likeness is None else {"likeness": recipe.likeness}
    return {**recipe.settings, **named, **likeness}


def recipe_problems(card: ModelCard) -> Iterator[str]:
    """Yield why the model refuses the settings of a recipe, and the qualities that stand for none of them."""
    for quality, name in card.qualities.items():
        if name not in card.recipes:
            recipes = ", ".join(card.recipes) or "none"
            yield f"qualities.{quality} of {card.name} is {name!r}; the model's recipes: {recipes}"
    known = [lora.name for lora in card.loras]
    for name, recipe in card.recipes.items():
        try:
            if missing := [lora.name for lora in (*recipe.lora, *recipe.second_stage_lora) if lora.name not in known]:
                raise ValueError(f"the model has no adapter {missing[0]}; its adapters: {', '.join(known) or 'none'}")
            body = with_recipe(_body_of(name, card), card)
            validated(type(body), {"prompt": "a", **recipe.settings})
            choose_attention(body, card)
            guidance_scale, true_cfg_scale = choose_scales(body, card)
            card.defaults.request(
                num_inference_steps=choose_steps(body, card.defaults),
                guidance_scale=guidance_scale,
                true_cfg_scale=true_cfg_scale,
                **_staged(body, card),
                solver=choose_solver(body),
                cache=body.cache or "off",
            )
        except (RequestError, ValueError) as error:
            yield f"the recipe {name} of {card.name}: {error}"


def _staged(body: MediaBody, card: ModelCard) -> dict[str, Any]:
    """Return the second pass of a recipe, and the size that requests have by default with it."""
    width, height = choose_size(body, card.defaults)
    second = choose_second_stage(body, card)
    return {} if second is None else {"second_stage": second, "width": width, "height": height}
